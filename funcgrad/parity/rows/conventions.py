"""Rows of section 10: documented differences, proved to be what we say they are today.

Each names torch's value and JAX's value; a release that changes either fails the row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad.parity._table import agree, row

nan = float("nan")


def _gradients(theirs: Callable[..., Any], ours: Callable[..., Any], *point: Any):
    """The gradients of the sum of either function at the point, one per argument."""
    import torch

    args = [torch.tensor(p, requires_grad=True) for p in point]
    grads = torch.autograd.grad(theirs(torch, *args).sum(), args)
    argnums = tuple(range(len(point)))
    here = jax.grad(lambda *x: jnp.sum(ours(*x)), argnums=argnums)(*map(jnp.array, point))
    return grads, here


@row(
    "conventions.abs",
    concept="slope of |x| at 0",
    torch="x.abs()  # 0",
    here="jnp.abs(x)  # 1",
    differs=True,
)
def abs_():
    """Torch takes the middle of the subgradient, JAX the right side."""
    theirs, here = _gradients(lambda torch, x: x.abs(), jnp.abs, 0.0)
    return agree(torch=(theirs[0], 0), here=(here[0], 1))


@row(
    "conventions.clamp",
    concept="slope of clamp at a bound",
    torch="x.clamp(0, 1)  # 1",
    here="jnp.clip(x, 0, 1)  # 0.5",
    differs=True,
    note="JAX's clip is a minimum of a maximum, and a tie shares the gradient.",
)
def clamp():
    """At both bounds."""
    theirs, here = _gradients(
        lambda torch, x: x.clamp(0.0, 1.0), lambda x: jnp.clip(x, 0.0, 1.0), [0.0, 1.0]
    )
    return agree(torch=(theirs[0], [1, 1]), here=(here[0], [0.5, 0.5]))


@row(
    "conventions.norm",
    concept="gradient of the L2 norm at 0",
    torch="torch.linalg.vector_norm(x)  # 0",
    here="jnp.linalg.norm(x)  # nan",
    differs=True,
    note="Write the root of a sum that is never 0, or optax.safe_norm.",
)
def norm():
    """The norm of a zero vector."""
    theirs, here = _gradients(
        lambda torch, x: torch.linalg.vector_norm(x), jnp.linalg.norm, [0.0, 0.0]
    )
    return agree(torch=(theirs[0], [0, 0]), here=(here[0], [nan, nan]))


@row(
    "conventions.std",
    concept="gradient of std of equal values",
    torch="x.std()  # 0",
    here="jnp.std(x, ddof=1)  # nan",
    differs=True,
)
def std():
    """The standard deviation of a constant vector."""
    theirs, here = _gradients(lambda torch, x: x.std(), lambda x: jnp.std(x, ddof=1), [1.0, 1.0])
    return agree(torch=(theirs[0], [0, 0]), here=(here[0], [nan, nan]))


@row(
    "conventions.power_zero",
    concept="slope of x**0.0 at 0",
    torch="x**0.0  # 0",
    here="x**0.0  # nan, and x**0: 0",
    differs=True,
    note="An integer exponent takes another rule in JAX.",
)
def power_zero():
    """A float exponent gives 0·0⁻¹ in JAX, an integer exponent is exact."""
    theirs, here = _gradients(lambda torch, x: x**0.0, lambda x: x**0.0, 0.0)
    exact, same = _gradients(lambda torch, x: x**0, lambda x: x**0, 0.0)
    return agree(torch=(theirs[0], 0), here=(here[0], nan), integer=(exact[0], same[0], 0))


@row(
    "conventions.hypot",
    concept="gradient of hypot at (0, 0)",
    torch="torch.hypot(x, y)  # nan, nan",
    here="jnp.hypot(x, y)  # 0.5, 0.5",
    differs=True,
)
def hypot():
    """Here it is torch that gives NaN."""
    theirs, here = _gradients(lambda torch, x, y: torch.hypot(x, y), jnp.hypot, 0.0, 0.0)
    return agree(torch=(theirs, [nan, nan]), here=(here, [0.5, 0.5]))


@row(
    "conventions.atan2",
    concept="gradient of atan2 at (0, 0)",
    torch="torch.atan2(y, x)  # 0, 0",
    here="jnp.arctan2(y, x)  # nan, nan",
    differs=True,
)
def atan2():
    """Torch masks the division by zero."""
    theirs, here = _gradients(lambda torch, y, x: torch.atan2(y, x), jnp.arctan2, 0.0, 0.0)
    return agree(torch=(theirs, [0, 0]), here=(here, [nan, nan]))


@row(
    "conventions.leaky_relu",
    concept="slope of leaky_relu at 0",
    torch="F.leaky_relu(x, 0.1)  # 0.1",
    here="jax.nn.leaky_relu(x, 0.1)  # 1",
    differs=True,
)
def leaky_relu():
    """Torch takes the left slope, JAX the right one."""
    theirs, here = _gradients(
        lambda torch, x: torch.nn.functional.leaky_relu(x, 0.1),
        lambda x: jax.nn.leaky_relu(x, 0.1),
        0.0,
    )
    return agree(torch=(theirs[0], 0.1), here=(here[0], 1))


@row(
    "conventions.relu_nan",
    concept="slope of relu at NaN",
    torch="torch.relu(x)  # 1",
    here="jax.nn.relu(x)  # 0",
    differs=True,
    note="The value is NaN in both, the slope at 0 is 0 in both.",
)
def relu_nan():
    """A NaN is not below zero for torch, and not above zero for JAX."""
    theirs, here = _gradients(lambda torch, x: torch.relu(x), jax.nn.relu, [nan, 0.0])
    return agree(torch=(theirs[0], [1, 0]), here=(here[0], [0, 0]), value=(jax.nn.relu(nan), nan))


@row(
    "conventions.hardtanh",
    concept="slope of hardtanh at a bound",
    torch="F.hardtanh(x)  # 0",
    here="jax.nn.hard_tanh(x)  # 1",
    differs=True,
)
def hardtanh():
    """At both bounds."""
    theirs, here = _gradients(
        lambda torch, x: torch.nn.functional.hardtanh(x), jax.nn.hard_tanh, [-1.0, 1.0]
    )
    return agree(torch=(theirs[0], [0, 0]), here=(here[0], [1, 1]))


@row(
    "conventions.xlogy",
    concept="slope of xlogy in x at (0, 0)",
    torch="torch.xlogy(x, y)  # 0",
    here="jax.scipy.special.xlogy(x, y)  # -inf",
    differs=True,
)
def xlogy():
    """The slope in x is log y, which torch masks where x is 0; in y both give NaN."""
    theirs, here = _gradients(
        lambda torch, x, y: torch.xlogy(x, y), jax.scipy.special.xlogy, 0.0, 0.0
    )
    return agree(torch=(theirs[0], 0), here=(here[0], -jnp.inf), in_y=(theirs[1], here[1], nan))


@row(
    "conventions.max_ties",
    concept="gradient of max along an axis, ties",
    torch="x.max(0).values  # one winner",
    here="jnp.max(x, 0)  # shared",
    differs=True,
    note="torch's x.max() over everything and x.amax() share as JAX does.",
)
def max_ties():
    """[1, 3, 3]: torch's max with an index gives all to the first of the two."""
    point = [1.0, 3.0, 3.0]
    theirs, here = _gradients(lambda torch, x: x.max(0).values, lambda x: jnp.max(x, 0), point)
    whole, _ = _gradients(lambda torch, x: x.max(), jnp.max, point)
    amax, _ = _gradients(lambda torch, x: x.amax(), jnp.max, point)
    return agree(torch=(theirs[0], [0, 1, 0]), here=(here[0], whole[0], amax[0], [0, 0.5, 0.5]))


@row(
    "conventions.median_ties",
    concept="gradient of the median, ties",
    torch="x.median()  # shared",
    here="jnp.median(x)  # one winner",
    differs=True,
)
def median_ties():
    """[1, 2, 2, 3, 2]: here torch shares among the three equal values."""
    theirs, here = _gradients(lambda torch, x: x.median(), jnp.median, [1.0, 2.0, 2.0, 3.0, 2.0])
    third = 1 / 3
    return agree(torch=(theirs[0], [0, third, third, 0, third]), here=(here[0], [0, 0, 1, 0, 0]))


@row(
    "conventions.median_even",
    concept="median of an even number of values",
    torch="x.median()  # 2, the lower",
    here="jnp.median(x)  # 2.5, their mean",
    differs=True,
    note="jnp.quantile(x, 0.5, method='lower') is torch's.",
)
def median_even():
    """[1, 2, 3, 4]."""
    import torch

    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    theirs = torch.tensor([1.0, 2.0, 3.0, 4.0]).median()
    lower = jnp.quantile(x, 0.5, method="lower")
    return agree(torch=(theirs, lower, 2), here=(jnp.median(x), 2.5))


@row(
    "conventions.variance",
    concept="default of the variance",
    torch="x.var()  # divides by n - 1",
    here="jnp.var(x)  # divides by n",
    differs=True,
    note="jnp.var(x, ddof=1) is torch's; layer normalisation divides by n in both.",
)
def variance():
    """[1, 2, 3, 4]: 5/3 and 5/4."""
    import torch

    t, x = torch.tensor([1.0, 2.0, 3.0, 4.0]), jnp.array([1.0, 2.0, 3.0, 4.0])
    return agree(
        torch=(t.var(), jnp.var(x, ddof=1), 5 / 3), here=(jnp.var(x), t.var(correction=0), 5 / 4)
    )


@row(
    "conventions.gelu",
    concept="default of gelu",
    torch="F.gelu(x)  # exact",
    here="jax.nn.gelu(x)  # tanh approximation",
    differs=True,
    note="jax.nn.gelu(x, approximate=False) is torch's.",
)
def gelu():
    """Each default equals the other side's option, and they differ by about 1.5e-4 at 1."""
    import torch

    theirs, x = torch.nn.functional.gelu, torch.tensor(1.0)
    exact, tanh = theirs(x), theirs(x, approximate="tanh")
    return agree(
        torch=(exact, jax.nn.gelu(1.0, approximate=False)),
        here=(jax.nn.gelu(1.0), tanh),
        apart=(abs(float(exact - tanh)) > 1e-4, True),
    )


@row(
    "conventions.complex",
    concept="gradient in a complex variable",
    torch="(z.abs() ** 2).backward()  # 2+4j",
    here="jax.grad(lambda z: jnp.abs(z) ** 2)(z)  # 2-4j",
    differs=True,
    note="Gradients are conjugates of each other, tangents are equal.",
)
def complex_():
    """Torch returns the direction of steepest ascent, JAX its conjugate."""
    import torch

    z = torch.tensor(1.0 + 2.0j, requires_grad=True)
    (z.abs() ** 2).backward()
    square = lambda z: (z * z.conj()).real
    t = torch.tensor(1.0 - 1.0j)
    tangent = torch.func.jvp(square, (z.detach(),), (t,))[1]

    here = jax.grad(lambda z: jnp.abs(z) ** 2)(1.0 + 2.0j)
    _, ours = jax.jvp(square, (jnp.array(1.0 + 2.0j),), (jnp.array(1.0 - 1.0j),))

    return agree(torch=(z.grad, 2 + 4j), here=(here, 2 - 4j), tangent=(tangent, ours, -2))
