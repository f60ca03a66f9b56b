"""Frozen leaves: one specification for gradient, norm, decay and optimiser state."""

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._trees import LeafSpec, choose_leaves, is_key, keystr

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class _Trainable:
    """An NNX filter; equal paths make equal filters, so that compiled steps are found again."""

    paths: frozenset[tuple[Any, ...]]

    def __call__(self, path: Any, value: Any) -> bool:
        return tuple(path) in self.paths


@dataclasses.dataclass(frozen=True, eq=False)
class Freeze:
    """Which leaves are frozen, and what follows from it; made by ``freeze``."""

    spec: LeafSpec
    """As given; ``per_sample`` and ``clipped_grad`` take the same under ``frozen``."""

    def split(self, params: Any) -> tuple[Any, Any]:
        """The trainable leaves and the fixed ones, each tree with ``None`` in place of the other.

        To JAX ``None`` is nothing: any transformation, norm or optimiser of the first tree
        leaves the fixed leaves out.

        Args:
          params: Any pytree, leaves of any kind; of an NNX module its state.
        """
        if _is_module(params):
            raise TypeError(
                "freeze: split takes a tree of leaves; got an NNX module, whose leaves may be "
                "shared. Pass nnx.state(module), or hand filter(module) to NNX."
            )
        leaves, tree = jax.tree.flatten(params)
        fixed = self._is_fixed(params)
        pairs = list(zip(leaves, fixed, strict=True))
        return (
            tree.unflatten([None if is_fixed else leaf for leaf, is_fixed in pairs]),
            tree.unflatten([leaf if is_fixed else None for leaf, is_fixed in pairs]),
        )

    @staticmethod
    def merge(trainable: Any, fixed: Any) -> Any:
        """The whole tree from the two that ``split`` made.

        Args:
          trainable: The first, which training has changed.
          fixed: The second.
        """
        return jax.tree.map(
            lambda a, b: b if a is None else a, trainable, fixed, is_leaf=lambda x: x is None
        )

    def grad(self, fun: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
        """Like ``jax.grad`` of ``fun`` by its first argument, without the frozen leaves.

        Args:
          fun: ``fun(params, *args)``, a real scalar; with ``has_aux`` a pair of it and a tree.
          has_aux: Whether ``fun`` returns a pair.

        Returns:
          As ``value_and_grad``, without the value.
        """
        both = self.value_and_grad(fun, has_aux=has_aux)

        def grad(params: Any, /, *args: Any, **kwargs: Any) -> Any:
            value, grads = both(params, *args, **kwargs)
            return (grads, value[1]) if has_aux else grads

        return grad

    def value_and_grad(
        self, fun: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., Any]:
        """Like ``jax.value_and_grad`` of ``fun`` by its first argument, without the frozen leaves.

        Args:
          fun: ``fun(params, *args)``, a real scalar; with ``has_aux`` a pair of it and a tree.
            ``params`` may be an NNX module: it is differentiated by ``nnx.value_and_grad``,
            which keeps what ``fun`` changes in it.
          has_aux: Whether ``fun`` returns a pair.

        Returns:
          A function of (params, *args) to the value and the gradients: a tree like
          ``params`` with ``None`` at frozen leaves; for a module the state of the others.
        """

        def value_and_grad(params: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _is_module(params):
                return self._module_value_and_grad(fun, has_aux, params, *args, **kwargs)
            trainable, fixed = self.split(params)
            _refuse_all_frozen(jax.tree.leaves(trainable), len(jax.tree.leaves(params)))

            def of_trainable(trainable: Any) -> Any:
                return fun(self.merge(trainable, fixed), *args, **kwargs)

            return jax.value_and_grad(of_trainable, has_aux=has_aux)(trainable)

        return value_and_grad

    def optimizer(
        self, tx: "optax.GradientTransformation"
    ) -> "optax.GradientTransformationExtraArgs":
        """The transformation ``tx`` of the trainable leaves, for whole trees.

        Its state holds nothing for frozen leaves, norms and decays do not see them, and
        ``optax.apply_updates`` leaves their bits as they are (unless the device itself takes
        subnormal numbers for zero, as the CPU does where ``apply_updates`` is not in the same
        ``jit`` as ``update``).  Gradients of frozen leaves may be ``None`` or anything;
        ``update`` needs ``params``.

        Args:
          tx: Any Optax transformation.
        """
        import optax

        inner = optax.with_extra_args_support(tx)

        def init(params: Any) -> Any:
            return inner.init(self.split(params)[0])

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            if params is None:
                raise ValueError(
                    "freeze: which leaves are frozen is read off params; got none in update. "
                    "Call update(grads, state, params)."
                )
            trainable, fixed = self.split(params)
            flags = jax.tree.unflatten(jax.tree.structure(params), self._is_fixed(params))
            given = jax.tree.map(lambda is_fixed, g: None if is_fixed else g, flags, updates)
            _refuse_missing(trainable, given)
            if extra.get("grad") is not None:  # of a line search: that of the whole
                extra["grad"] = jax.tree.map(
                    lambda is_fixed, g: None if is_fixed else g, flags, extra["grad"]
                )
            if extra.get("value_fn") is not None:  # of one, too, which tries whole parameters
                value_fn = extra["value_fn"]
                extra["value_fn"] = lambda t, *args, **kwargs: value_fn(
                    self.merge(t, fixed), *args, **kwargs
                )
            new, state = inner.update(given, state, trainable, **extra)
            return self.merge(new, jax.tree_util.tree_map_with_path(_keep, fixed)), state

        return optax.GradientTransformationExtraArgs(init, update)

    def filter(self, model: Any) -> _Trainable:
        """An NNX filter of the trainable ``nnx.Param`` of a module.

        For ``nnx.Optimizer(model, tx, wrt=filter)`` and ``nnx.DiffState(0, filter)``.  A
        shared variable has one path, the first, as in ``nnx.state``.

        Args:
          model: An NNX module.
        """
        from flax import nnx

        state = nnx.state(model, nnx.Param)
        fixed: dict[tuple[Any, ...], set[bool]] = {
            tuple(p): set() for p, _ in nnx.to_flat_state(state)
        }
        params = nnx.to_pure_dict(state)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for path, is_fixed in zip(paths, self._is_fixed(params), strict=True):
            keys = tuple(getattr(key, "key", None) for key in path)
            # A variable may hold a tree, whose leaves have longer paths than itself.
            variable = next(keys[:n] for n in range(len(keys) + 1) if keys[:n] in fixed)
            fixed[variable].add(is_fixed)
            if len(fixed[variable]) > 1:
                raise ValueError(
                    "freeze: a variable of a module is frozen as a whole; got some leaves of "
                    f"{'/'.join(map(str, variable))}. Name all of them, or make them variables."
                )
        return _Trainable(frozenset(path for path, found in fixed.items() if found == {False}))

    def _module_value_and_grad(
        self, fun: Any, has_aux: bool, model: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        from flax import nnx

        wanted = self.filter(model)
        _refuse_all_frozen(wanted.paths, len(jax.tree.leaves(nnx.state(model, nnx.Param))))
        both = nnx.value_and_grad(fun, argnums=nnx.DiffState(0, wanted), has_aux=has_aux)
        return both(model, *args, **kwargs)

    def _is_fixed(self, params: Any) -> list[bool]:
        chosen = choose_leaves(self.spec, params, "freeze")
        leaves = jax.tree.leaves(params)
        return [c or not _is_trainable(leaf) for c, leaf in zip(chosen, leaves, strict=True)]


def freeze(spec: LeafSpec) -> Freeze:
    """Freeze leaves of the parameters: one specification for all that follows from it.

    Of a frozen leaf there is no gradient (it is not computed, and nothing is kept for it), no
    part in the clip norm, no weight decay and no optimiser state, and training leaves it
    as it is bit for bit.  Leaves that are not floating, counters and keys, are always fixed.
    PyTorch: ``p.requires_grad_(False)``.

    ===================  ==================================================================
    a weight used twice  one leaf: frozen in both places
    gradients            ``frozen.grad(loss)(params, batch)``, ``None`` at frozen leaves
    optimiser            ``frozen.optimizer(tx)``, an Optax transformation
    NNX modules          ``frozen.grad`` takes them; ``nnx.Optimizer(model, tx,
                         wrt=frozen.filter(model))``
    anything else        ``trainable, fixed = frozen.split(params)``, then
                         ``frozen.merge(trainable, fixed)``
    ===================  ==================================================================

    Args:
      spec: Glob patterns of paths (``"embed/*"``; ``"embed"`` names all below it), a
        predicate of (path, leaf), or a tree of booleans that may stop early.

    Returns:
      A ``Freeze``.

    Raises:
      ValueError: When it meets parameters: a pattern names no leaf (near names are listed),
        a tree of booleans does not fit, all leaves are frozen and a gradient is wanted, a
        trained leaf comes to the optimiser without gradient, or an NNX variable that holds a
        tree is frozen in part.
      TypeError: Parameters whose optimiser would have to add to keys, or to a dtype without
        zero; an NNX module given to ``split``.

    Example:
      >>> import optax
      >>> frozen = fg.freeze("embed")
      >>> params = {"embed": jnp.ones(2), "head": jnp.array([3.0, 4.0])}
      >>> grads = frozen.grad(lambda p: p["embed"] @ p["head"])(params)
      >>> grads
      {'embed': None, 'head': Array([1., 1.], dtype=float32)}
      >>> tx = frozen.optimizer(optax.sgd(0.5))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> optax.apply_updates(params, updates)
      {'embed': Array([1., 1.], dtype=float32), 'head': Array([2.5, 3.5], dtype=float32)}
    """
    return Freeze(spec)


def _is_trainable(leaf: Any) -> bool:
    return jnp.issubdtype(_dtype(leaf), jnp.inexact)


def _dtype(leaf: Any) -> Any:
    """The dtype of an array or a number, and of anything else the one of objects."""
    if isinstance(leaf, int | float | complex):
        return jnp.result_type(leaf)
    has_one = hasattr(leaf, "dtype") and not isinstance(leaf, type)  # as `jnp.float32` itself
    return leaf.dtype if has_one else np.dtype(object)


def _keep(path: Any, leaf: Any) -> Any:
    """What ``apply_updates`` adds to a frozen leaf so that no bit changes."""
    dtype = _dtype(leaf)
    is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    if not is_number and not is_key(leaf):
        return None  # a function in an Equinox module: its apply_updates passes over None
    if not is_number or np.zeros((), dtype).item() != 0:
        kind = f"of {dtype}, which has no zero" if is_number else "a key"
        raise TypeError(
            f"freeze: optax.apply_updates adds to every leaf; got params{keystr(path)}, {kind}. "
            "Keep such leaves out of params, or train the first tree of split()."
        )
    # Negative zero: -0.0 + 0.0 would be 0.0.
    zeros = jnp.zeros_like(leaf)
    return -zeros if jnp.issubdtype(dtype, jnp.inexact) else zeros


def _refuse_missing(trainable: Any, updates: Any) -> None:
    def check(path: Any, leaf: Any, update: Any) -> None:
        if update is None:
            raise ValueError(
                f"freeze: every trained leaf has a gradient; got None for params{keystr(path)}. "
                "Use one specification for the gradient and the optimiser."
            )

    jax.tree_util.tree_map_with_path(check, trainable, updates)


def _refuse_all_frozen(trainable: Any, n_leaves: int) -> None:
    if not trainable:
        raise ValueError(
            f"freeze: some leaf is trained; got a specification that freezes all {n_leaves} "
            "leaves. Freeze fewer, or do not differentiate."
        )


def _is_module(params: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # who holds a module has imported it
    return nnx is not None and isinstance(params, nnx.Module)
