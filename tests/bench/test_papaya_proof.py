"""PAPAYA's figures: what two lines a method say of them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from benchmarks.proofs import papaya
from benchmarks.proofs.common import Settings
from mimose.bench.rows import Row, read

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def answer():
    """Return what the proof finds."""
    return papaya.ask(Settings(threads=1), argparse.Namespace())


def told(row):
    """Return a row without where it was made."""
    shared = {field.name for field in dataclasses.fields(Row)}
    return {
        name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(row).items()
        if name not in shared
    }


def test_every_verdict_is_right(answer):
    """Of 20 methods, by both ways of saying it."""
    methods = [row for row in answer.rows if row.part == "method"]
    assert 20 == len(methods)
    assert all(row.is_told and row.is_scored for row in methods)


@pytest.mark.parametrize("index", range(9))
def test_points_left_out_are_predicted_or_refused(answer, index):
    """From four points: R² of 0.98 for bytes, and for throughput where it is time."""
    row = [row for row in answer.rows if row.part == "series"][index]
    if row.quantity == "seconds":
        assert ("knee", "") == (row.form, row.refused)
        assert 0.98 <= row.throughput_r2
    else:
        assert row.refused or row.r2 >= 0.98


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_the_rows_of_the_documentation_are_these(answer):
    """They need no machine: what is written down is found again."""
    rows = read(DOCS / "results" / "cpu" / "papaya.csv", papaya.PapayaRow)
    assert [told(row) for row in answer.rows] == [told(row) for row in rows]
