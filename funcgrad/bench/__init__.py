"""Benchmarks: several ways to the same numbers, measured in turns, each with its error."""

from funcgrad.bench._measure import Machine, Measurement, Timing, measure
from funcgrad.bench._readme import update_readme
from funcgrad.bench._report import TASKS, run, sections

__all__ = [
    "TASKS",
    "Machine",
    "Measurement",
    "Timing",
    "measure",
    "run",
    "sections",
    "update_readme",
]
