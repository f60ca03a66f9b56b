"""Random classes, the same in torch.autograd.Function: values, both derivatives, vmap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcgrad as fg
from conftest import PROGRAMS

torch = pytest.importorskip("torch", reason="torch is not installed")


UNARY = ("sin", "cos", "tanh", "exp")


def draw(rng, names, depth=2):
    """An expression of arrays: nested tuples."""
    if depth == 0 or rng.random() < 0.2:
        return str(rng.choice(names))
    if rng.random() < 0.4:
        return (str(rng.choice(UNARY)), draw(rng, names, depth - 1))
    return (str(rng.choice(["mul", "add", "sub"])), *(draw(rng, names, depth - 1) for _ in "ab"))


def compute(expression, values, xp):
    if isinstance(expression, str):
        return values[expression]
    kind, *args = expression
    args = [compute(arg, values, xp) for arg in args]
    if kind in UNARY:
        return getattr(xp, kind)(0.5 * args[0])
    return args[0] * args[1] if kind == "mul" else args[0] + (-1 if kind == "sub" else 1) * args[1]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What both classes are made from: a rule that is linear in the gradients and else free."""

    forward: tuple
    saved: tuple
    backward: tuple  # for each input None or one expression for each output
    modern: bool
    materialize: bool
    unused: bool

    @classmethod
    def draw(cls, seed):
        rng = np.random.default_rng(seed)
        inputs = [f"x{i}" for i in range(rng.integers(1, 4))]
        outputs = [f"y{i}" for i in range(rng.integers(1, 3))]
        # What torch differentiates when it is saved: inputs and outputs.
        saved = [str(s) for s in rng.permutation([*inputs, *outputs])[: rng.integers(1, 4)]]
        rule = [
            None
            if i and rng.random() < 0.2
            else tuple(draw(rng, saved) if rng.random() < 0.9 else None for _ in outputs)
            for i in range(len(inputs))
        ]
        return cls(
            tuple(draw(rng, inputs) for _ in outputs),
            tuple(saved),
            tuple(rule),
            modern=bool(rng.random() < 0.5),
            materialize=bool(rng.random() < 0.5),
            unused=len(outputs) > 1 and bool(rng.random() < 0.4),
        )

    def make(self, base, xp):
        """The class: torch's and ours are the same text."""
        drawn = self

        def values_of(inputs, outputs):
            names = {f"x{i}": x for i, x in enumerate(inputs)}
            return names | {f"y{i}": y for i, y in enumerate(outputs)}

        def run(inputs):
            values = values_of(inputs, ())
            return tuple(1.0 * compute(e, values, xp) for e in drawn.forward)

        def save(ctx, inputs, outputs):
            values = values_of(inputs, outputs)
            ctx.save_for_backward(*(values[name] for name in drawn.saved))
            if not drawn.materialize:
                ctx.set_materialize_grads(False)

        def backward(ctx, *grads):
            values = dict(zip(drawn.saved, ctx.saved_tensors, strict=True))
            found = []
            for terms in drawn.backward:
                total = None
                for g, term in zip(grads, terms or (), strict=bool(terms)):
                    if g is not None and term is not None:
                        piece = g * compute(term, values, xp)
                        total = piece if total is None else total + piece
                found.append(total)
            return tuple(found)

        methods = {"backward": backward, "generate_vmap_rule": True}
        if self.modern:
            methods |= {
                "forward": lambda *inputs: run(inputs),
                "setup_context": lambda ctx, inputs, output: save(ctx, inputs, output),
            }
        else:

            def classic(ctx, *inputs):
                outputs = run(inputs)
                save(ctx, inputs, outputs)
                return outputs

            methods |= {"forward": classic}
        static = {k: staticmethod(v) if callable(v) else v for k, v in methods.items()}
        return type("Drawn", (base,), static)


def check(seed):
    drawn = Drawn.draw(seed)
    theirs, ours = drawn.make(torch.autograd.Function, torch), drawn.make(fg.Function, jnp)
    rng = np.random.default_rng(seed)
    args = [rng.normal(size=3) for _ in drawn.backward]
    weights = rng.normal(size=3)
    places, tensors = tuple(range(len(args))), [torch.tensor(a, requires_grad=True) for a in args]
    wide = torch.tensor(weights)

    def loss(apply, xp, weights, *args):
        outputs = apply(*args)
        return sum((xp.sin(y) * weights).sum() for y in outputs[: 1 if drawn.unused else None])

    def close(got, expected, what):
        for a, b in zip(got, expected, strict=True):
            message = f"{what} of {seed}: {drawn}"
            np.testing.assert_allclose(a, b.detach(), rtol=1e-9, atol=1e-12, err_msg=message)

    value = loss(theirs.apply, torch, wide, *tensors)
    options = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(value, tensors, create_graph=True, **options)
    total = sum((g.cos() * wide).sum() for g in first)
    second = [torch.zeros(3)] * len(args)
    if total.requires_grad:
        second = torch.autograd.grad(total, tensors, **options)

    plain = lambda *args: loss(ours.apply, jnp, weights, *args)
    grads = jax.grad(plain, places)
    both = lambda *args: sum((jnp.cos(g) * weights).sum() for g in grads(*args))
    close([plain(*args)], [value], "value")
    close(grads(*args), first, "first derivative")
    close(jax.grad(both, places)(*args), second, "second derivative")
    if drawn.modern:
        rows = [np.stack([a, 2 * a]) for a in args]
        sample = lambda *args: loss(theirs.apply, torch, wide, *args)
        each = torch.vmap(torch.func.grad(sample, places))(*map(torch.tensor, rows))
        close(jax.vmap(grads)(*rows), each, "rows")


@pytest.mark.parametrize("block", range(5))
def test_random_classes_equal_torch_to_the_second_order_and_under_vmap(block, x64):
    each = max(5, PROGRAMS // 5)
    for seed in range(each * block, each * (block + 1)):
        check(seed)
