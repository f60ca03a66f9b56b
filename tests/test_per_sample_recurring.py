"""What recurs in a program is traced once, and the program is what it is without that."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcgrad as fg
from funcgrad import _jaxpr
from funcgrad._compat import primitives
from funcgrad._per_sample import _plan
from test_per_sample import check, draw
from test_per_sample_cases import bumpy

SCALES = (1.0, 2.0, 1.0, 1.0)


def layer(h, w, scale):
    h = jnp.tanh(h @ w) * scale
    return h + jnp.cos(h) / (1 + h**2)


def network(p, x):
    for i, (w, scale) in enumerate(zip(p, SCALES, strict=True)):
        with jax.named_scope(f"layer{i}"):
            x = layer(x, w, scale)
    return bumpy(x)


def inputs():
    return [draw(i, 4, 4) for i in range(len(SCALES))], draw(9, 3, 2, 4)


def clipped_sum(p, x):
    return fg.per_sample(network, road="gram")(p, x).clipped_sum(0.5)


def read(loss, params, x):
    """The reading of a loss."""
    leaves = jax.tree.leaves(params)
    traced = _jaxpr.trace(lambda leaves, x: loss(leaves, x), leaves, x[0])
    return _plan.plan(traced.jaxpr, len(leaves), 0)


def test_layers_alike_and_layers_that_differ_in_a_number_have_their_own_gradients(x64):
    params, x = inputs()
    check(network, params, x, takes="gram")
    runs = read(network, params, x).recurring.values()
    # The first scale is a literal that is left out; with the others a layer's lines are two runs.
    assert len(runs) > len({run.fun for run in runs}) > 0


def test_the_number_of_functions_does_not_grow_with_the_number_of_layers(x64):
    def deep(p, x):
        for w in p:
            x = layer(x, w, 2.0)
        return bumpy(x)

    found = {}
    for depth in (4, 8):
        level = read(deep, [draw(i, 4, 4) for i in range(depth)], draw(9, 3, 2, 4))
        runs = level.recurring.values()
        found[depth] = len({run.fun for run in runs}), sum(run.length for run in runs)
        # All but the last layer, whose last lines run on into what follows it.
        assert found[depth][1] >= 0.8 * (len(level.jaxpr.eqns) - depth) * (depth - 1) / depth
    assert found[4][0] == found[8][0]
    assert found[4][1] < found[8][1]


def test_names_and_lines_are_those_of_equations_run_one_by_one(x64, monkeypatch):
    def seen():
        program = jax.make_jaxpr(lambda *inputs: clipped_sum(*inputs))(*inputs())
        return Counter(
            (visit.eqn.primitive.name, names(visit), visit.line.line)
            for visit in _jaxpr.walk(program.jaxpr)
            if visit.line is not None
            and visit.line.file == __file__
            and visit.eqn.primitive is not primitives.jit_p
        )

    def names(visit):
        around = [str(eqn.source_info.name_stack) for eqn in (*visit.parents, visit.eqn)]
        return "/".join(filter(None, around))

    shared = seen()
    monkeypatch.setattr(_plan, "recurring", lambda jaxpr, among: {})
    apart = seen()
    assert shared == apart
    found = " ".join(name for _, name, _ in shared)
    assert all(f"layer{i}" in found for i in range(len(SCALES)))


def test_what_is_compiled_is_what_equations_run_one_by_one_give(x64, monkeypatch):
    def operations(calls):
        lowered = jax.jit(lambda *inputs: clipped_sum(*inputs)).lower(*inputs())
        assert ("call @again" in lowered.as_text()) == calls
        return Counter(re.findall(r" = \S+ (\w[\w-]*)\(", lowered.compile().as_text()))

    shared = operations(calls=True)
    monkeypatch.setattr(_plan, "recurring", lambda jaxpr, among: {})
    assert shared == operations(calls=False)


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1, True), (1.0, 1), (np.float32(1), 1.0)])
def test_numbers_that_python_calls_equal_are_told_apart(pair):
    one, other = map(_jaxpr.alike, pair)
    assert one != other
    assert _jaxpr.alike({"a": [one]}) == _jaxpr.alike({"a": [one]}) != _jaxpr.alike({"a": [other]})


def test_what_cannot_be_compared_is_like_itself_alone():
    array, same = np.ones(2), np.ones(2)
    assert _jaxpr.alike((array,)) == _jaxpr.alike((array,))
    assert _jaxpr.alike((array,)) != _jaxpr.alike((same,))
