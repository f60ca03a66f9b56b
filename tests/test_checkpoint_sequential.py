"""A chain computed again segment by segment: the same numbers, and the schedule of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funcgrad as fg

LAYERS = [jnp.sin, jnp.cos, jnp.tanh, lambda x: x * x, jnp.exp]


def chain(funs):
    def run(x):
        for fun in funs:
            x = fun(x)
        return x

    return run


def recording(ran, count):
    def layer(i):
        def run(x):
            jax.debug.callback(lambda: ran.append(i), ordered=True)
            return jnp.sin(x)

        return run

    return [layer(i) for i in range(count)]


@settings(max_examples=8)
@given(st.integers(1, 9), st.data())
def test_gradients_are_equal_to_the_bit(count, data):
    segments = data.draw(st.integers(1, count))
    funs = [LAYERS[i % 5] for i in range(count)]
    value, pull = jax.vjp(fg.checkpoint_sequential(funs, segments), jnp.float32(0.3))
    expected, plain = jax.vjp(chain(funs), jnp.float32(0.3))
    assert value == expected
    assert pull(jnp.float32(1))[0] == plain(jnp.float32(1))[0]


def test_five_functions_in_two_segments_run_01234_then_01():
    ran = []
    value, pull = jax.vjp(fg.checkpoint_sequential(recording(ran, 5), 2), 1.0)
    jax.effects_barrier()
    forward = list(ran)
    pull(1.0)
    jax.effects_barrier()
    assert (forward, ran[5:]) == ([0, 1, 2, 3, 4], [0, 1])


@pytest.mark.torch
@pytest.mark.parametrize("count, segments", [(5, 2), (5, 1), (5, 5), (7, 3), (4, 2)])
def test_the_schedule_is_torchs(torch, count, segments):
    from torch.utils.checkpoint import checkpoint_sequential

    theirs, ours = [], []
    layer = lambda i: lambda x: (theirs.append(i), x.sin())[1]
    x = torch.tensor(1.0, requires_grad=True)
    funs = [layer(i) for i in range(count)]
    checkpoint_sequential(funs, segments, x, use_reentrant=False).backward()

    grad = jax.grad(fg.checkpoint_sequential(recording(ours, count), segments))(1.0)
    jax.effects_barrier()
    assert ours == theirs
    np.testing.assert_allclose(grad, x.grad, rtol=1e-6)


def test_what_is_kept_is_the_segments_inputs_and_the_last_segment():
    saved = lambda segments: fg.saved_tensors(fg.checkpoint_sequential([jnp.sin] * 16, segments))(
        jnp.ones(8)
    )
    assert [len(saved(segments)) for segments in (1, 4, 16)] == [16, 3 + 4, 15 + 1]


def test_segments_take_trees_parameters_and_policies():
    params = [{"w": jnp.full((3, 3), 0.1 * i)} for i in range(1, 5)]

    def loss(params, x, run):
        funs = [lambda x, p=p: {"h": jnp.tanh(x["h"] @ p["w"])} for p in params]
        return run(funs)({"h": x})["h"].sum()

    x = jnp.arange(6.0).reshape(2, 3)
    again = lambda funs: fg.checkpoint_sequential(funs, 2, policy=fg.policies.save_dots())
    found = jax.jit(jax.grad(lambda p, x: loss(p, x, again)))(params, x)
    expected = jax.jit(jax.grad(lambda p, x: loss(p, x, chain)))(params, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    saved = fg.saved_tensors(lambda p, x: loss(p, x, again), argnums=0)(params, x)
    assert [t.operation for t in saved if t.kind == "computed"].count("dot_general") == 2


@pytest.mark.parametrize("segments", [0, 6, -1])
def test_a_segment_has_a_function(segments):
    with pytest.raises(ValueError, match=f"got {segments} segments for 5 functions"):
        fg.checkpoint_sequential(LAYERS, segments)
