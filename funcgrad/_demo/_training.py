"""Training with clipped, noised per-sample gradients, and the privacy that it has."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcgrad as fg
from funcgrad._demo import _digits
from funcgrad._demo._digits import Digits

_OVERFLOW = 1e-9
"""How likely any batch of a training may exceed its padded size; taken from delta."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the training does, which is also all that its privacy depends on."""

    steps: int = 150
    expected_batch: int = 256
    max_norm: float = 0.5
    noise_multiplier: float = 3.0
    learning_rate: float = 0.25
    momentum: float = 0.9
    delta: float = 1e-4
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Poisson sampling into batches of one padded size."""

    n_samples: int
    rate: float
    capacity: int
    overflow: float
    """The probability that any batch of the training exceeds ``capacity``."""

    @staticmethod
    def of(recipe: Recipe, n_samples: int) -> "Sampling":
        """A padded size that all batches of the training fit in, but for a negligible chance."""
        from scipy.stats import binom

        rate = recipe.expected_batch / n_samples
        capacity = int(binom.isf(_OVERFLOW / recipe.steps, n_samples, rate))
        capacity = min(n_samples, -(-capacity // 8) * 8)
        overflow = recipe.steps * float(binom.sf(capacity, n_samples, rate))
        return Sampling(n_samples, rate, capacity, overflow)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The places of a batch, padded, and the mask that is false for padding.

        Every sample is drawn by its own coin.  A batch that does not fit is an error: to drop
        some of it would be another sampling than the one that epsilon is computed for.
        """
        drawn = np.flatnonzero(rng.random(self.n_samples) < self.rate)
        if len(drawn) > self.capacity:
            raise RuntimeError(
                f"demo: a batch fits its padded size; got {len(drawn)} samples for "
                f"{self.capacity}. Its chance was {self.overflow:.0e}: take another seed."
            )
        padding = self.capacity - len(drawn)
        return np.pad(drawn, (0, padding)), np.arange(self.capacity) < len(drawn)


def epsilon(recipe: Recipe, sampling: Sampling) -> float:
    """Epsilon for one sample added or removed, at ``recipe.delta``."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    step = dp_accounting.PoissonSampledDpEvent(
        sampling.rate, dp_accounting.GaussianDpEvent(recipe.noise_multiplier)
    )
    accountant = PLDAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, recipe.steps))
    return float(accountant.get_epsilon(recipe.delta - sampling.overflow))


@dataclasses.dataclass(frozen=True)
class Trained:
    """Parameters, and the test accuracy on the way to them."""

    params: Any
    steps: list[int]
    accuracies: list[float]


def train(
    recipe: Recipe,
    sampling: Sampling,
    digits: tuple[Digits, Digits],
    *,
    private: bool,
    progress: Callable[[int, float], object],
) -> Trained:
    """Train from new parameters; with neither clipping nor noise if not ``private``.

    ``progress`` is called after each step with its number and the latest test accuracy.
    """
    train_digits, test_digits = digits
    optimizer = optax.sgd(recipe.learning_rate, recipe.momentum)
    params = _digits.new_params(recipe.seed)
    state = optimizer.init(params)
    gradient = _noised_gradient(recipe) if private else _mean_gradient(recipe)
    rng = np.random.default_rng(recipe.seed)
    key = jax.random.key(recipe.seed + 1)

    @jax.jit
    def update(params: Any, state: Any, images: Any, labels: Any, mask: Any, key: Any) -> Any:
        updates, state = optimizer.update(gradient(params, images, labels, mask, key), state)
        return optax.apply_updates(params, updates), state

    steps, accuracies = [0], [_digits.accuracy(params, test_digits)]
    for step in range(1, recipe.steps + 1):
        places, mask = sampling.draw(rng)
        batch = train_digits.images[places], train_digits.labels[places], mask
        params, state = update(params, state, *batch, jax.random.fold_in(key, step))
        if step % 10 == 0 or step == recipe.steps:
            steps.append(step)
            accuracies.append(_digits.accuracy(params, test_digits))
        progress(step, accuracies[-1])
    return Trained(params, steps, accuracies)


def _noised_gradient(recipe: Recipe) -> Callable[..., Any]:
    clipped_grad = fg.clipped_grad(
        _digits.loss, max_norm=recipe.max_norm, mean_over=recipe.expected_batch
    )
    deviation = recipe.noise_multiplier * clipped_grad.sensitivity()

    def gradient(params: Any, images: Any, labels: Any, mask: Any, key: Any) -> Any:
        grads = clipped_grad(params, images, labels, mask=mask).grads
        leaves, tree = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        noised = [
            leaf + deviation * jax.random.normal(key, leaf.shape, leaf.dtype)
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(tree, noised)

    return gradient


def _mean_gradient(recipe: Recipe) -> Callable[..., Any]:
    def mean_loss(params: Any, images: Any, labels: Any, mask: Any) -> Any:
        losses = jax.vmap(_digits.loss, (None, 0, 0))(params, images, labels)
        return jnp.sum(jnp.where(mask, losses, 0)) / recipe.expected_batch

    return lambda params, images, labels, mask, key: jax.grad(mean_loss)(
        params, images, labels, mask
    )
