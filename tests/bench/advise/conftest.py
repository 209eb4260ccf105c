"""Measurements made by hand: methods whose bytes and seconds are lines."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from mimose.bench.advise.measure import Measured, Measurements, Step

MIB = 2**20
BATCHES = (2, 4, 8, 16, 32)
SCATTER = (0.0, 1.0, -1.0, 0.5, -0.5, 0.25, -0.25)
"""Of the rounds, times the noise."""
FIXTURES = str(Path(__file__).parents[2] / "fixtures")


@pytest.fixture
def toys(monkeypatch):
    """Return a module of a user's, as the name that is asked for finds it."""
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FIXTURES, known]))
    return importlib.import_module("advise_toys")


@pytest.fixture
def line():
    """Return a method that takes ``a*x + b`` MiB and ``g*x + d`` seconds."""

    def make(name, a, b, g, d, *, noise=0.002, batches=BATCHES, rounds=7):
        def step(x):
            n_bytes, seconds = (a * x + b) * MIB, g * x + d
            return Step(
                batch=x,
                peak_bytes=n_bytes,
                reserved_bytes=n_bytes,
                seconds=seconds,
                rounds=tuple(seconds * (1 + noise * s) for s in SCATTER[:rounds]),
            )

        return Measured(method=name, steps=tuple(map(step, batches)))

    return make


@pytest.fixture
def measurements():
    """Return measurements of some methods."""

    def make(*methods, budget_mib, **changes):
        return Measurements(
            **{
                "model": "a small one",
                "batch": 16,
                "budget_bytes": budget_mib * MIB,
                "device": "cpu",
                "dtype": "float32",
                "optimizer": "adamw",
                "machine": {"device": "cpu: a slow one"},
                "promised_seconds": 300.0,
                "taken_seconds": 287.0,
                "is_interrupted": False,
                "methods": methods,
                **changes,
            }
        )

    return make
