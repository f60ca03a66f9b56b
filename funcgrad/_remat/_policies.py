"""Policies: which of a program's values a checkpoint keeps."""

import dataclasses
import difflib
import enum
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable

from funcgrad._compat import primitives, remat3_enabled
from funcgrad._remat._values import SavedTensor

Field: TypeAlias = Literal["name", "operation", "path"]
_PRODUCTS = (primitives.dot_general_p, primitives.conv_general_dilated_p)


class Decision(enum.Enum):
    """What becomes of one value between the forward and the backward pass."""

    RECOMPUTE = "recompute"
    SAVE = "save"
    OFFLOAD = "offload"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An output that a policy decides on.

    ``value`` is ``None`` where JAX asks about an equation outside of its program.
    """

    primitive: Any
    params: Mapping[str, Any]
    names: tuple[str, ...] = ()
    value: SavedTensor | None = None

    def texts(self, field: Field) -> tuple[str, ...]:
        """What a word of a policy may stand for."""
        if field == "name" or self.value is None:
            return self.names
        return (getattr(self.value, field),)


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A choice of values to keep, made by the functions of ``fg.policies``.

    ``a | b`` keeps what either keeps, ``a & b`` what both keep, ``~a`` what ``a`` does not
    keep.  Where one of the two offloads a value that both keep, it is offloaded by ``a & b``;
    by ``a | b`` as the first of them says that keeps it.

    Given to ``fg.checkpoint``, every word in it (a name, an operation, a path) must mark a
    value of the function.  It may also be given to ``jax.checkpoint``, ``flax.linen.remat``
    and ``flax.nnx.remat`` as long as it can be decided by one equation alone: not by name
    (nobody could say that the name marks nothing), path or predicate, and not under
    ``jax_remat3``, which would ignore it; there it raises.
    """

    text: str
    decide: Callable[[Candidate], Decision]
    words: tuple[tuple[Field, str], ...] = ()
    alone: bool = True

    def __or__(self, other: "Policy") -> "Policy":
        if not isinstance(other, Policy):
            return NotImplemented

        def decide(candidate: Candidate) -> Decision:
            first = self.decide(candidate)
            return other.decide(candidate) if first is Decision.RECOMPUTE else first

        return self._with(other, "|", decide)

    def __and__(self, other: "Policy") -> "Policy":
        if not isinstance(other, Policy):
            return NotImplemented

        def decide(candidate: Candidate) -> Decision:
            both = self.decide(candidate), other.decide(candidate)
            if Decision.RECOMPUTE in both:
                return Decision.RECOMPUTE
            return Decision.OFFLOAD if Decision.OFFLOAD in both else Decision.SAVE

        return self._with(other, "&", decide)

    def __invert__(self) -> "Policy":
        def decide(candidate: Candidate) -> Decision:
            kept = self.decide(candidate) is not Decision.RECOMPUTE
            return Decision.RECOMPUTE if kept else Decision.SAVE

        return Policy(f"~{self.text}", decide, self.words, self.alone)

    def _with(self, other: "Policy", sign: str, decide: Any) -> "Policy":
        text = f"({self.text} {sign} {other.text})"
        return Policy(text, decide, self.words + other.words, self.alone and other.alone)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """Decide on one equation, as ``jax.checkpoint`` asks while it differentiates."""
        self._refuse_if_ignored()
        if not self.alone:
            raise TypeError(
                f"jax.checkpoint(policy={self.text}): JAX shows a policy one equation, without "
                "its place in the program and without the others; got a policy that needs them. "
                "Use fg.checkpoint(fun, policy=...)."
            )
        decision = self.decide(Candidate(primitive, params))
        if decision is Decision.OFFLOAD:
            return Offloadable(src="device", dst="pinned_host")
        return Saveable if decision is Decision.SAVE else Recompute

    # jax_remat3 never calls a policy that it does not know.  It asks for its class at every
    # product and name, and for its hash at every loop and call: the places to refuse it.
    def __hash__(self) -> int:
        self._refuse_if_ignored()
        return id(self)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._refuse_if_ignored()
        return Policy

    def _refuse_if_ignored(self) -> None:
        if remat3_enabled():
            raise TypeError(
                f"jax.checkpoint(policy={self.text}): under jax_remat3 JAX ignores every policy "
                "but its own, and computes everything again; got another. "
                "Use fg.checkpoint(fun, policy=...)."
            )

    def __repr__(self) -> str:
        return self.text

    def check(self, candidates: Sequence[Candidate], call: str) -> None:
        """Refuse a word that marks none of ``candidates``, with those that come near it."""
        for field, word in self.words:
            present = sorted({text for one in candidates for text in one.texts(field)} - {""})
            if any(_matches(field, text, word) for text in present):
                continue
            near = difflib.get_close_matches(word, present, n=3, cutoff=0.4) or present[:5]
            there = f"Near it: {', '.join(near)}." if near else f"The function has no {field}s."
            raise ValueError(
                f"{call}: each {field} in a policy marks a value that the checkpoint can keep; "
                f"got {word!r}, which marks none. {there}"
            )


def _matches(field: Field, text: str, word: str) -> bool:
    if field == "path":
        return bool(text) and fnmatch.fnmatchcase(f"/{text}/", f"*/{word}/*")
    return text == word


def save_nothing() -> Policy:
    """Keep nothing: everything is computed again.  ``jax.checkpoint`` without a policy.

    Example:
      >>> fg.policies.save_nothing()
      save_nothing()
    """
    return Policy("save_nothing()", lambda candidate: Decision.RECOMPUTE)


def save_everything() -> Policy:
    """Keep every value that the backward pass uses: start of ``~`` and ``&``.

    Example:
      >>> fg.policies.save_everything() & ~fg.policies.save_operations("exp")
      (save_everything() & ~save_operations('exp'))
    """
    return Policy("save_everything()", lambda candidate: Decision.SAVE)


def save_dots(*, batched: bool = True) -> Policy:
    """Keep the outputs of matrix products and convolutions.

    PyTorch: ``MUST_SAVE`` for ``aten.mm``, ``bmm``, ``convolution`` in a selective checkpoint.

    Args:
      batched: Whether to keep products with batch axes too, such as attention scores.

    Example:
      >>> fg.policies.save_dots(batched=False)
      save_dots(batched=False)
    """

    def decide(candidate: Candidate) -> Decision:
        if candidate.primitive not in _PRODUCTS:
            return Decision.RECOMPUTE
        if not batched and candidate.primitive is primitives.dot_general_p:
            _, (left, _) = candidate.params["dimension_numbers"]
            return Decision.RECOMPUTE if left else Decision.SAVE
        return Decision.SAVE

    return Policy("save_dots()" if batched else "save_dots(batched=False)", decide)


def save_operations(*operations: str) -> Policy:
    """Keep the outputs of some operations.

    A custom derivative rule is one operation, ``custom_jvp_call`` or ``custom_vjp_call``:
    what happens within it is its own affair.

    Args:
      operations: Names of primitives, as in a printed jaxpr and in ``fg.saved_tensors``.

    Example:
      >>> fg.policies.save_operations("exp", "tanh")
      save_operations('exp', 'tanh')
    """
    words: tuple[tuple[Field, str], ...] = tuple(("operation", word) for word in operations)

    def decide(candidate: Candidate) -> Decision:
        return _save_if(candidate.primitive.name in operations)

    return Policy(_spelled("save_operations", operations), decide, words)


def save_names(*names: str) -> Policy:
    """Keep the values named by ``jax.ad_checkpoint.checkpoint_name``.

    The value is kept, not only its named copy: naming the output of ``exp``, whose
    derivative uses the unnamed one, does nothing in ``save_only_these_names``.

    Args:
      names: Names given in the function; each must mark a value.

    Example:
      >>> fg.policies.save_names("attention", "mlp")
      save_names('attention', 'mlp')
    """
    words: tuple[tuple[Field, str], ...] = tuple(("name", word) for word in names)

    def decide(candidate: Candidate) -> Decision:
        return _save_if(any(name in names for name in candidate.names))

    return Policy(_spelled("save_names", names), decide, words, alone=False)


def save_paths(*patterns: str) -> Policy:
    """Keep the values made in some modules, or under some ``jax.named_scope``.

    Args:
      patterns: Glob patterns for a run of whole parts of a path: ``"layer_?/mlp"`` is found
        in ``Encoder/layer_0/mlp/Dense_1``.  Flax Linen names its modules, NNX does not.

    Example:
      >>> fg.policies.save_paths("mlp") & fg.policies.save_dots()
      (save_paths('mlp') & save_dots())
    """
    words: tuple[tuple[Field, str], ...] = tuple(("path", word) for word in patterns)

    def decide(candidate: Candidate) -> Decision:
        path = candidate.value.path if candidate.value else ""
        return _save_if(any(_matches("path", path, word) for word in patterns))

    return Policy(_spelled("save_paths", patterns), decide, words, alone=False)


def save_where(predicate: Callable[[SavedTensor], bool]) -> Policy:
    """Keep the values that a predicate chooses.

    Args:
      predicate: Function of a ``SavedTensor``: shape, bytes, operation, name, path, line.

    Example:
      >>> small = fg.policies.save_where(lambda value: value.bytes <= 1024)
    """
    if not callable(predicate):
        raise TypeError(
            f"policies.save_where: a predicate is a function of a SavedTensor; got {predicate!r}."
        )

    def decide(candidate: Candidate) -> Decision:
        return _save_if(candidate.value is not None and bool(predicate(candidate.value)))

    name = getattr(predicate, "__name__", "predicate")
    return Policy(f"save_where({name})", decide, alone=False)


def offload(policy: Policy) -> Policy:
    """Keep what ``policy`` keeps, but in the memory of the host.

    PyTorch: ``torch.autograd.graph.save_on_cpu``.  A backend without such memory refuses it
    when it compiles; JAX's CPU backend accepts it and copies nothing.  JAX refuses a second
    reverse pass through a value that it has offloaded; forward over reverse and reverse over
    forward work.

    Args:
      policy: What to keep.

    Example:
      >>> fg.policies.offload(fg.policies.save_dots())
      offload(save_dots())
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policies.offload: a policy is made by fg.policies; got {policy!r}.")

    def decide(candidate: Candidate) -> Decision:
        kept = policy.decide(candidate) is not Decision.RECOMPUTE
        return Decision.OFFLOAD if kept else Decision.RECOMPUTE

    return Policy(f"offload({policy.text})", decide, policy.words, policy.alone)


def _save_if(chosen: bool) -> Decision:
    return Decision.SAVE if chosen else Decision.RECOMPUTE


def _spelled(function: str, words: tuple[str, ...]) -> str:
    if not words or not all(isinstance(word, str) for word in words):
        raise TypeError(f"policies.{function}: give one string or more; got {words!r}.")
    return f"{function}({', '.join(map(repr, words))})"


def jax_policy(offloads: bool, keep: str, offloaded: str) -> Any:
    """JAX's own policy that keeps the values of two names, in a form it does not ignore."""
    if not offloads:
        return jax.checkpoint_policies.save_only_these_names(keep)
    if remat3_enabled():
        raise NotImplementedError(
            "checkpoint: under jax_remat3 JAX cannot offload what it saves; got a policy that "
            "offloads. Leave the offloading out, or turn the flag off."
        )
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[keep],
        names_which_can_be_offloaded=[offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
