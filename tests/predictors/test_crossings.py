"""Memory sizes at which another method is the fastest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mimose.predictors import MethodModel, Series, flips

PLAIN = MethodModel("plain", Series.line(100.0, 1000.0), Series.line(1.0, 10.0))
SAVING = MethodModel("saving", Series.line(20.0, 1000.0), Series.line(1.2, 10.0))


def drawn(rng, name):
    """Return a model with or without knees and fixed time."""
    bends = rng.uniform(1.0, 20.0, 2) * rng.integers(0, 2, 2)
    slope = rng.uniform(0.5, 2.0)
    fixed = rng.uniform(-0.9 * slope * max(1.0, bends[1]), 20.0)
    form = ["line" if bend == 0.0 else "knee" for bend in bends]
    base = rng.uniform(100.0, 300.0)
    memory = Series(
        form=form[0], slope=rng.uniform(5, 50), intercept=base, knee=bends[0]
    )
    seconds = Series(form=form[1], slope=slope, intercept=fixed, knee=bends[1])
    return MethodModel(name, memory, seconds)


def test_a_known_crossing():
    """Where the p-score is the p-point: 80 / 0.2 bytes a second, of 10 seconds."""
    first, second = flips([PLAIN, SAVING], 500.0, 1e5)
    assert (None, "saving") == first[1:]
    assert 1020.0 == pytest.approx(first.memory_bytes)
    assert ("saving", "plain") == second[1:]
    assert 1000.0 + 400.0 * 10.0 == pytest.approx(second.memory_bytes)


def test_the_fastest_of_a_fine_grid():
    """Between two sizes it is always the one that was told."""
    rng = np.random.default_rng(0)
    crossings = 0
    for _ in range(60):
        models = [drawn(rng, name) for name in "abcd"]
        found = flips(models, 100.0, 3000.0)
        crossings += sum(flip.before is not None for flip in found)
        for memory in np.linspace(101.0, 2999.0, 200):
            rates = {
                model.name: model.best_throughput(memory, whole=False)[1]
                for model in models
            }
            most = max(rates.values())
            said = [f.after for f in found if f.memory_bytes <= memory][-1:]
            if not said:
                said = [found[0].before] if found else [max(rates, key=rates.get)]
            if said[0] is None:
                assert 0.0 == most
            else:
                assert most == pytest.approx(rates[said[0]], rel=1e-6)
    assert crossings > 30


def test_methods_that_do_not_fit_are_out():
    """However fast they would be."""
    fast = MethodModel("fast", Series.line(1.0, 1e6), Series.line(0.1, 0.0))
    assert not flips([PLAIN, fast], 2000.0, 1e5)


def test_seconds_below_nothing_are_no_time():
    """A line that is negative up to a batch of 5 says nothing of smaller ones."""
    odd = MethodModel("odd", Series.line(10.0, 0.0), Series.line(1.0, -5.0))
    [flip] = flips([odd], 5.0, 1000.0)
    assert (pytest.approx(50.0), None, "odd") == flip


def test_equals_do_not_flip():
    """The first of them is the fastest all along."""
    twin = replace(PLAIN, name="twin")
    assert not flips([PLAIN, twin], 2000.0, 1e5)


@pytest.mark.parametrize("sizes", [(0.0, 1.0), (2.0, 1.0), (1.0, float("inf"))])
def test_sizes_are_in_order(sizes):
    """And positive, and finite."""
    with pytest.raises(ValueError, match="positive and finite"):
        flips([PLAIN], *sizes)
