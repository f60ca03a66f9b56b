"""``python -m funcgrad demo``: per-sample gradients and private training on real digits."""

from funcgrad._demo._run import run as run
