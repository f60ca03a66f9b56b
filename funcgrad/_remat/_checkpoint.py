"""Compute again in the backward pass rather than keep: by policy, or within a budget."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from funcgrad._compat import ClosedJaxpr
from funcgrad._jaxpr import evaluate, trace, walk
from funcgrad._remat._inputs import split_arrays, unchanged
from funcgrad._remat._keep import NAMES, Keeper, choose
from funcgrad._remat._policies import Decision, Policy, jax_policy, save_nothing


def checkpoint(
    fun: Callable[..., Any],
    *,
    policy: Any = None,
    budget: int | float | None = None,
    budget_kind: str = "residuals",
) -> Callable[..., Any]:
    """Compute the values of ``fun`` again in its backward pass, all but the chosen ones.

    ``jax.checkpoint`` with three differences: a policy is a value of ``fg.policies`` that is
    checked against the function, so that a misspelt name is an error and not full
    recomputation; it means the same under ``jax_remat3``; and a budget may stand in its
    place.  Composes with every transformation of JAX; gradients of any order and forward
    mode are those of ``fun``.

    Under a budget, ``fun`` is planned whenever its gradient is traced: wrap the step in
    ``jax.jit``, as without ``jit`` every call plans, and compiles its loops, again.  Equal
    programs have equal plans, on every host: the solver is stopped by a count of its work, not
    by a clock (an emergency stop after two minutes warns).  Forward mode shows what a
    ``jax.debug.callback`` shows once, but twice within a custom derivative rule.

    PyTorch: ``torch.utils.checkpoint.checkpoint(fun, *args, use_reentrant=False,
    context_fn=...)``; ``torch._functorch.config.activation_memory_budget``.

    Args:
      fun: Function of arrays in pytrees; other arguments (flags, plain numbers) are passed
        as they are.  It may close over arrays, differentiated ones too.
      policy: What to keep; nothing when both ``policy`` and ``budget`` are ``None``.
      budget: Bytes to keep (an integer), or a fraction of what ``fun`` keeps without a
        checkpoint (a float): what to keep is then chosen for the least recomputation.
      budget_kind: How a budget counts, ``"residuals"`` or ``"peak"``: see ``fg.plan``.

    Returns:
      A function like ``fun``.

    Raises:
      TypeError: ``policy`` is not made by ``fg.policies``, or comes with a ``budget``.
      ValueError: a word of the policy marks nothing; no choice stays within the budget, and the
        least possible is named; forward mode of a function under a budget that would come out
        otherwise when computed again (``lax.rng_uniform``, ``io_callback``, a ref); or ``fun``
        changes an argument in place, as NNX modules that draw random numbers do; or a policy
        meets ``lax.rng_uniform``, which gives other numbers the second time: a budget keeps them.

    Example:
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> fun = lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "inner")) ** 2
      >>> kept = fg.checkpoint(fun, policy=fg.policies.save_names("inner"))
      >>> [t.what for t in fg.saved_tensors(kept)(1.0)]
      ['x', 'inner']
      >>> fg.checkpoint(fun, policy=fg.policies.save_names("iner"))(1.0)
      Traceback (most recent call last):
      ValueError: ... got 'iner', which marks none. Near it: inner.

    References:
      Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016.
    """
    if budget is not None:
        if policy is not None:
            raise TypeError(
                "checkpoint: a policy or a budget decides what is kept; got both. Leave one out."
            )
        from funcgrad._remat._budget import checkpoint_under_budget

        return checkpoint_under_budget(fun, budget, budget_kind)
    if policy is None:
        policy = save_nothing()
    if not isinstance(policy, Policy):
        raise TypeError(
            f"checkpoint: a policy is made by fg.policies; got {policy!r}. "
            "JAX's own policies go to jax.checkpoint."
        )

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = split_arrays(args, kwargs)
        traced = trace(lambda arrays: unchanged(fun, *rebuild(arrays), "checkpoint"), arrays)
        refuse_unrepeatable(traced.jaxpr)
        choice = choose(traced.jaxpr.jaxpr, policy, f"checkpoint(policy={policy!r})")

        def run(consts: Any, arrays: Any) -> Any:
            return evaluate(traced.jaxpr.jaxpr, consts, arrays, Keeper(choice))

        offloads = any(kept.decision is Decision.OFFLOAD for row in choice.values() for kept in row)
        names = NAMES[Decision.SAVE], NAMES[Decision.OFFLOAD]
        again = jax.checkpoint(run, policy=jax_policy(offloads, *names))
        return traced.unflatten(again(traced.jaxpr.consts, arrays))

    return checkpointed


def refuse_unrepeatable(jaxpr: ClosedJaxpr) -> None:
    """Refuse a random operation whose second run gives other numbers than its first."""
    for visit in walk(jaxpr):
        if visit.eqn.primitive.name == "rng_uniform":
            raise ValueError(
                "checkpoint: what is computed again must come out the same; got "
                f"lax.rng_uniform, which has no key, at {visit.line}. Use jax.random."
            )
