"""Rows survive a CSV file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mimose.bench.rows import StepRow, read_rows, write_rows


def test_rows_come_back_equal(rows: list[StepRow], tmp_path: Path) -> None:
    """Types, None and every digit of a float survive."""
    path = tmp_path / "rows.csv"

    write_rows(path, rows)

    assert read_rows(path) == rows


def test_every_field_is_a_column(rows: list[StepRow], tmp_path: Path) -> None:
    """The header names the dataclass's fields, in order."""
    path = tmp_path / "rows.csv"
    write_rows(path, rows)

    header = path.read_text(encoding="utf-8").splitlines()[0]

    assert header.split(",") == [field.name for field in fields(StepRow)]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    """A file of another version is not read as if it were one of this."""
    path = tmp_path / "rows.csv"
    path.write_text("step,loss\n1,2\n", encoding="utf-8")

    with pytest.raises(ValueError, match="has columns"):
        read_rows(path)


def test_growth_is_over_the_start(rows: list[StepRow]) -> None:
    """Growth, observed and predicted, leaves out what was held before."""
    mimose, plain = rows[7], rows[4]

    assert plain.growth_bytes == 512 * 2**20
    assert plain.predicted_growth_bytes is None
    assert mimose.predicted_growth_bytes == pytest.approx(mimose.growth_bytes / 1.01)
