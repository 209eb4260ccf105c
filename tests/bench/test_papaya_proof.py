"""PAPAYA's figures: what two lines a method say of them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from benchmarks.proofs import papaya
from benchmarks.proofs.common import Settings
from benchmarks.proofs.papaya import ROWS, SERIES, UNITS
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


def test_what_is_published_is_read_in_bytes_and_seconds():
    """A model's unit is its own."""
    row = next(row for row in ROWS if row[:2] == ("BERT-L", "quant L1 + ckpt"))
    assert 8.55 * UNITS["MiB"] == row.fitted.memory.slope
    assert 5.6e-3 == row.fitted.seconds.intercept
    assert (12_800 * UNITS["MiB"], 784, 90.0) == row[3:]
    assert 25 == len(ROWS)
    assert 9 == len(SERIES)


def test_every_verdict_is_right(answer):
    """Of 20 methods, by both ways of saying it."""
    methods = [row for row in answer.rows if row.part == "method"]
    assert 20 == len(methods)
    assert all(row.is_told and row.is_scored for row in methods)


def test_a_wrong_verdict_is_told(answer):
    """Where the measurement says otherwise, both are wrong."""
    row = answer.rows[0]
    turned = dataclasses.replace(row, measured_throughput=1e6)
    assert row.is_told
    assert not (turned.is_told or turned.is_scored)


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


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_the_table_of_the_documentation_comes_from_the_rows(answer):
    """Every R² of it, and how many points were left."""
    page = (DOCS / "bench.md").read_text(encoding="utf-8")
    for row in answer.rows:
        if row.part == "series":
            is_time = row.throughput_r2 is not None
            r2 = row.throughput_r2 if is_time else row.r2
            cells = f"| {row.points - row.fitted} | {r2:.4f} |"
            assert any(
                row.model in line and cells in line for line in page.splitlines()
            )
