"""PyTorch beside JAX: the concept table, each row proved by running both, and the bridge."""

from funcgrad.parity._bridge import grads_to_jax, grads_to_torch, to_jax, to_torch
from funcgrad.parity._compare import Comparison, compare
from funcgrad.parity._flax_tree import flax_grads, flax_params
from funcgrad.parity._report import markdown, run, update_readme
from funcgrad.parity._table import Check, Outcome, Row, evaluate
from funcgrad.parity.rows import ROWS

__all__ = [
    "ROWS",
    "Check",
    "Comparison",
    "Outcome",
    "Row",
    "compare",
    "evaluate",
    "flax_grads",
    "flax_params",
    "grads_to_jax",
    "grads_to_torch",
    "markdown",
    "run",
    "to_jax",
    "to_torch",
    "update_readme",
]
