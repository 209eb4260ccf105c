"""Measurements made by hand: methods whose bytes and seconds are lines."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from mimose.bench.advise.measured import Measured, Measurements, Timed, Weighed

MIB = 2**20
BATCHES = (2, 4, 8, 16, 32)
SCATTER = (0.0, 1.0, -1.0, 0.5, -0.5, 0.25, -0.25)
"""Of the rounds, times the noise."""


@pytest.fixture
def toys(monkeypatch):
    """Return a module of a user's, as the name that is asked for finds it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures"))
    return importlib.import_module("advise_toys")


@pytest.fixture
def line():
    """Return a method that takes ``a*x + b`` MiB and ``g*x + d`` seconds."""

    def make(name, a, b, g, d, *, noise=0.002, batches=BATCHES, lengths=(), rounds=7):
        weighed = [
            Weighed(
                batch=x,
                length=None,
                peak_bytes=int((a * x + b) * MIB),
                reserved_bytes=int((a * x + b) * MIB),
                seconds=g * x + d,
            )
            for x in batches
        ]
        weighed += [
            Weighed(
                batch=16,
                length=tokens,
                peak_bytes=int((a * 16 * tokens / 128 + b) * MIB),
                reserved_bytes=int((a * 16 * tokens / 128 + b) * MIB),
                seconds=1.0,
            )
            for tokens in lengths
        ]
        timed = [
            Timed(
                batch=x,
                length=None,
                rounds=tuple((g * x + d) * (1 + noise * s) for s in SCATTER[:rounds]),
            )
            for x in batches
        ]
        return Measured(
            method=name, weighed=tuple(weighed), timed=tuple(timed if rounds else ())
        )

    return make


@pytest.fixture
def measurements():
    """Return measurements of some methods."""

    def make(*methods, budget_mib, **changes):
        return Measurements(
            **{
                "model": "a small one",
                "batch": 16,
                "length": 128,
                "budget_bytes": budget_mib * MIB,
                "device": "cpu",
                "dtype": "float32",
                "optimizer": "adamw",
                "threads": 2,
                "machine": {"device": "cpu: a slow one"},
                "load_average": 0.4,
                "promised_seconds": 300.0,
                "taken_seconds": 287.0,
                "n_rounds": 7,
                "is_interrupted": False,
                "methods": methods,
                **changes,
            }
        )

    return make
