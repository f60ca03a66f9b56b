"""Handwritten digits and a small convolutional network that reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import funcgrad as fg


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images (n, 8, 8, 1) from 0 to 1, their labels, and their places in the data set."""

    images: np.ndarray
    labels: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load() -> tuple[Digits, Digits]:
    """1,437 digits to train on and 360 to test on, each label in its share."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    parts = train_test_split(np.arange(len(labels)), test_size=360, random_state=0, stratify=labels)
    train, test = (Digits(images[part], labels[part], part) for part in map(np.asarray, parts))
    return train, test


class Network(nn.Module):
    """Two convolutions and a dense layer; bounded activations, which noise disturbs less."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """The logits (batch, 10) of images (batch, 8, 8, 1)."""
        x = nn.tanh(nn.Conv(16, (3, 3))(images))
        x = nn.tanh(nn.Conv(32, (3, 3), strides=(2, 2))(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def new_params(seed: int) -> Any:
    """Fresh parameters."""
    return Network().init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))


def loss_of_batch(params: Any, images: Any, labels: Any) -> Any:
    """The cross-entropy, summed over the batch."""
    logits: Any = Network().apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def loss(params: Any, image: Any, label: Any) -> Any:
    """The cross-entropy of one digit."""
    return loss_of_batch(params, image[None], label[None])


@jax.jit
def predict(params: Any, images: Any) -> Any:
    """The digit that the network reads in each image."""
    logits: Any = Network().apply(params, images)
    return logits.argmax(-1)


def accuracy(params: Any, digits: Digits) -> float:
    """The share of the digits that the network reads as they are labelled."""
    return float((predict(params, digits.images) == digits.labels).mean())


@jax.jit
def gradient_norms(params: Any, images: Any, labels: Any) -> Any:
    """Each sample's gradient norm, from one backward pass."""
    return fg.per_sample(loss)(params, images, labels).norms()
