"""Products that are transposed, written as one product."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import funcgrad as fg
from funcgrad import _jaxpr


def primitives_of(fun, *args):
    """How often each primitive is run, at any depth, without what nobody reads."""
    jaxpr = jax.make_jaxpr(jax.jit(fun))(*args)
    return [visit.eqn.primitive.name for visit in _jaxpr.walk(jaxpr.jaxpr)]


def folded(fun, *args):
    """``fun`` folded, under jit, as a function of its arguments."""
    return jax.jit(lambda *args: _jaxpr.fold_transposes(lambda leaves: fun(*leaves))(list(args)))


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_only_the_swap_of_the_sides_is_folded(permutation):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 4, 5))
    fun = lambda a, b: [jnp.matmul(a, b).transpose(permutation)]
    np.testing.assert_allclose(
        folded(fun)(a, b)[0], np.matmul(a, b).transpose(permutation), rtol=1e-5, atol=1e-6
    )
    names = primitives_of(folded(fun), a, b)
    assert ("transpose" in names) == (permutation not in [(0, 1, 2), (0, 2, 1)])


@pytest.mark.parametrize(("n_left", "n_right"), [(0, 1), (1, 0), (2, 1), (1, 2), (2, 2)])
def test_sides_of_any_number_of_axes_keep_their_order(n_left, n_right):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(3, *range(4, 4 + n_left), 2))
    b = rng.normal(size=(2, *range(6, 6 + n_right), 3))
    numbers = (((a.ndim - 1,), (0,)), ((0,), (b.ndim - 1,)))
    n = 1 + n_left
    order = (0, *range(n, n + n_right), *range(1, n))
    fun = lambda a, b: [
        lax.dot_general(a, b, numbers, precision=("high", "highest")).transpose(order)
    ]
    np.testing.assert_allclose(folded(fun)(a, b)[0], fun(a, b)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("around", ["jit", "checkpoint", "scan", "cond"])
def test_products_are_folded_in_nested_programs(around):
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    product = lambda a, b: jnp.dot(a, b).T
    nested = {
        "jit": jax.jit(product),
        "checkpoint": jax.checkpoint(product),
        "scan": lambda a, b: lax.scan(lambda c, x: (c, product(x, b)), 0, a[None])[1],
        "cond": lambda a, b: lax.cond(a[0, 0] > 1, product, lambda a, b: product(-a, b), a, b),
    }[around]
    fun = lambda a, b: [nested(a, b)]
    assert "transpose" in primitives_of(fun, a, b)
    assert "transpose" not in primitives_of(folded(fun), a, b)
    np.testing.assert_array_equal(folded(fun)(a, b)[0], jax.jit(fun)(a, b)[0])


def test_a_product_that_is_read_on_both_sides_is_there_twice():
    a, b = jnp.ones((2, 3)), jnp.arange(12.0).reshape(3, 4)

    def fun(a, b):
        y = a @ b
        return [y, y.T]

    for found, expected in zip(folded(fun)(a, b), fun(a, b), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_python_may_read_numbers_where_nothing_is_staged():
    fun = lambda x: x**3 if x > 0 else x**2
    one, six = jnp.array(1.0), jnp.array(6.0)
    assert fg.hvp(fun, one, one) == six
    derivative = jax.grad(lambda x: fg.hvp(fun, x, jnp.array(1.0)))  # staged, but not abstract
    assert derivative(one) == six


def test_the_product_with_the_hessian_needs_no_transpose_of_a_weight():
    weights = [jnp.full((8, 8), 0.1 * i) for i in range(1, 4)]

    def loss(weights):
        x = jnp.arange(16.0).reshape(2, 8) / 16
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    plain = lambda w, v: jax.jvp(jax.grad(loss), (w,), (v,))[1]
    ours = lambda w, v: fg.hvp(loss, w, v)
    compiled: list[Any] = [jax.jit(f).lower(weights, weights).compile() for f in (plain, ours)]
    first, second = (c(weights, weights) for c in compiled)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    assert sizes[1] < sizes[0]
    assert " transpose(" not in compiled[1].as_text()
