import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from scipy.stats import norm

from funcgrad import _demo
from funcgrad._demo import _digits, _run, _training
from funcgrad._demo._training import Recipe, Sampling
from funcgrad.bench import _per_sample


@pytest.fixture
def console():
    return Console(record=True, width=100, force_terminal=False)


class Linear:
    """The smallest network that reads digits, where the network is not what is tested."""

    def apply(self, params, images):
        return images.reshape(len(images), -1) @ params["w"]


WEIGHTS = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)


def linear_grads(images, labels):
    """Of each digit, by hand: the input times what the probabilities are off by."""
    xs = np.asarray(images, np.float64).reshape(len(images), -1)
    logits = xs @ WEIGHTS
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.einsum("ni,nj->nij", xs, probabilities - np.eye(10)[labels])


@pytest.fixture
def small_network(monkeypatch):
    monkeypatch.setattr(_digits, "Network", Linear)
    monkeypatch.setattr(_digits, "new_params", lambda seed: {"w": WEIGHTS})


def test_quick_demo_writes_pictures_and_figures(console, tmp_path, small_network, monkeypatch):
    # The table has its own tests, and so have the other roads.
    every = _per_sample.all_roads
    monkeypatch.setattr(_per_sample, "all_roads", lambda *args: every(*args)[:2])
    monkeypatch.setattr(_run, "_show_parity", lambda *args: (0, {"fail": 0}))
    out = tmp_path / "new"
    assert _demo.run(out, quick=True, console=console) == 0
    for picture in ("training.png", "largest_gradients.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    figures = json.loads((out / "demo.json").read_text())
    assert set(figures) == {
        "quick", "machine", "roads", "training", "largest_gradients", "parity", "seconds",
    }  # fmt: skip
    assert figures["training"]["epsilon"] > 0
    assert all(timing["sum_error"] < 1e-3 for timing in figures["roads"]["timings"])
    norms = [digit["norm"] for digit in figures["largest_gradients"]]
    assert norms == sorted(norms, reverse=True)
    assert figures["parity"]["fail"] == 0
    text = console.export_text()
    assert "one digit added or removed" in text and "Poisson" in text


def test_demo_says_so_where_torch_is_absent(console, tmp_path, monkeypatch):
    find_spec = _run.importlib.util.find_spec
    monkeypatch.setattr(
        _run.importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    status, counts = _run._show_parity(tmp_path, True, console)
    assert status == 0 and counts["fail"] == counts["pass"] == 0
    assert "torch is not installed" in console.export_text()


def test_padded_batch_is_never_exceeded_but_for_a_negligible_chance():
    sampling = Sampling.of(Recipe(), 1437)
    assert 256 < sampling.capacity < 1437
    assert 0 <= sampling.overflow <= 1e-9
    assert sampling.rate * sampling.n_samples == 256


def test_draw_takes_each_sample_by_its_own_coin():
    sampling = Sampling(n_samples=50, rate=0.3, capacity=50, overflow=0.0)
    rng = np.random.default_rng(0)
    counts, sizes = np.zeros(50), []
    for _ in range(2000):
        places, mask = sampling.draw(rng)
        assert places.shape == mask.shape == (50,)
        drawn = places[mask]
        assert len(set(drawn.tolist())) == len(drawn)
        counts[drawn] += 1
        sizes.append(len(drawn))
    # Five standard deviations of a binomial share; the sizes vary as sums of coins do.
    assert np.abs(counts / 2000 - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / 2000)
    assert np.var(sizes) == pytest.approx(50 * 0.3 * 0.7, rel=0.2)


def test_draw_refuses_a_batch_beyond_its_padded_size():
    sampling = Sampling(n_samples=100, rate=0.5, capacity=8, overflow=1.0)
    with pytest.raises(RuntimeError, match=r"a batch fits its padded size; got \d+ samples for 8"):
        sampling.draw(np.random.default_rng(0))


def test_epsilon_of_one_step_on_all_data_is_the_gaussian_mechanisms():
    recipe = Recipe(steps=1, expected_batch=1000, noise_multiplier=2.0, delta=1e-4)
    sampling = Sampling.of(recipe, 1000)
    assert sampling.rate == 1
    epsilon = _training.epsilon(recipe, sampling)
    # Balle and Wang, 2018; the accountant rounds losses up to a grid of 1e-4.
    s = recipe.noise_multiplier
    delta = norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * norm.cdf(-0.5 / s - epsilon * s)
    assert delta == pytest.approx(recipe.delta, rel=1e-2) and delta <= recipe.delta


def test_more_noise_and_fewer_steps_are_more_private():
    def epsilon(**changes):
        recipe = Recipe(**changes)
        return _training.epsilon(recipe, Sampling.of(recipe, 1437))

    usual = epsilon()
    assert epsilon(noise_multiplier=6.0) < usual and epsilon(steps=50) < usual


def test_noise_of_an_empty_batch_has_the_deviation_that_epsilon_is_computed_for(monkeypatch):
    monkeypatch.setattr(_digits, "loss", lambda w, x, y: x @ w)  # which compiles sooner
    recipe = Recipe(noise_multiplier=3.0, max_norm=0.5, expected_batch=16)
    w, xs, ys = jnp.zeros(10_000), jnp.ones((2, 10_000)), jnp.zeros(2)
    gradient = jax.jit(_training._noised_gradient(recipe))
    entries = np.asarray(gradient(w, xs, ys, jnp.zeros(2, bool), jax.random.key(0)))
    # The deviation of 10,000 draws is within 4% but for one seed in ten thousand.
    assert entries.std() == pytest.approx(3.0 * 0.5 / 16, rel=0.04)
    assert abs(entries.mean()) < 5 * entries.std() / math.sqrt(entries.size)


def test_gradient_without_privacy_ignores_padding(small_network):
    recipe = Recipe(expected_batch=2)
    images = np.random.default_rng(1).uniform(size=(3, 8, 8, 1)).astype(np.float32)
    labels, mask = np.array([1, 2, 3]), np.array([True, True, False])
    gradient = jax.jit(_training._mean_gradient(recipe))
    got = gradient({"w": WEIGHTS}, images, labels, mask, jax.random.key(0))
    expected = linear_grads(images, labels)[:2].sum(0) / 2
    np.testing.assert_allclose(got["w"], expected, atol=1e-6)


def test_network_has_a_logit_for_each_digit():
    params = jax.eval_shape(lambda: _digits.new_params(0))
    images = jax.ShapeDtypeStruct((3, 8, 8, 1), jnp.float32)
    assert jax.eval_shape(_digits.predict, params, images).shape == (3,)
    labels = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert jax.eval_shape(_digits.loss_of_batch, params, images, labels).shape == ()
    assert params["params"]["Dense_0"]["kernel"].shape == (512, 10)


def test_data_are_split_without_overlap_and_norms_equal_the_loop(small_network):
    train, test = _digits.load()
    assert (len(train), len(test)) == (1437, 360)
    assert not set(train.places.tolist()) & set(test.places.tolist())
    images, labels = train.images[:3], train.labels[:3]
    norms = _digits.gradient_norms({"w": WEIGHTS}, images, labels)
    expected = [np.linalg.norm(grad) for grad in linear_grads(images, labels)]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
