"""Generated programs as forward, with their own derivative as backward: nothing may change."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

import funcgrad as fg
from conftest import PROGRAMS
from programs import Program, Step, programs


def as_function(fun):
    """``fun`` behind a rule that is its own derivative."""

    class Same(fg.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.save_for_backward(*args)
            return fun(*args)

        @staticmethod
        def backward(ctx, g):
            _, pull = jax.vjp(fun, *ctx.saved_tensors)
            grads = pull(g)
            return tuple(None if _is_float0(grad) else grad for grad in grads)

    return Same.apply


def _is_float0(grad):
    return getattr(grad, "dtype", None) == jax.dtypes.float0


def kinds(steps: tuple[Step, ...]) -> set[str]:
    return {step.kind for step in steps}.union(*(kinds(step.body) for step in steps))


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(np.abs(b).max(initial=0.0)))
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-9, atol=1e-9)


@settings(max_examples=max(3, PROGRAMS // 10 - 3))
@given(programs(depth=1, max_size=4))
def test_a_program_behind_its_own_derivative_is_the_program(program: Program):
    with jax.enable_x64(True):
        params, batch = program.params(np.float64), program.inputs(np.float64, batch=2)
        x, t = batch[0][0], batch[1][0]
        # custom_vjp has no forward mode; ours would have to transpose what it holds.
        forward_mode = "odd_tanh" not in kinds(program.steps)

        def everything(loss):
            grad = jax.grad(loss)
            rows = jax.vmap(grad, (None, 0, 0))(params, *batch)
            summed = jax.grad(lambda p: jax.vmap(loss, (None, 0, 0))(p, *batch).sum())(params)
            twice = jax.grad(
                lambda p: sum(jnp.sin(g).sum() for g in jax.tree.leaves(grad(p, x, t)))
            )(params)
            again = jax.grad(lambda p: jax.checkpoint(loss)(p, x, t))(params)
            found = [loss(params, x, t), grad(params, x, t), rows, summed, twice, again]
            if forward_mode:
                along = jax.tree.map(jnp.cos, params)
                found += [
                    jax.jvp(lambda p: loss(p, x, t), (params,), (along,))[1],
                    jax.jvp(lambda p: grad(p, x, t), (params,), (along,))[1],
                ]
            return found

        assert_close(
            jax.jit(lambda: everything(as_function(program.loss)))(),
            jax.jit(lambda: everything(program.loss))(),
        )
