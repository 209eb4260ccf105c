"""The picture is made from the CSV file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimose.bench.figure import draw, spread
from mimose.bench.rows import StepRow, write_rows

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "strategies", [("none",), ("none", "full", "static", "mimose")]
)
def test_draws_from_the_file(
    rows: list[StepRow], tmp_path: Path, strategies: tuple[str, ...]
) -> None:
    """A picture comes of whatever strategies there are."""
    path, picture = tmp_path / "rows.csv", tmp_path / "new" / "demo.png"
    write_rows(path, [row for row in rows if row.strategy in strategies])

    draw(path, picture)

    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_says_what_is_seen(rows: list[StepRow], tmp_path: Path) -> None:
    """Units, budget, strategies and the machine are written on the picture."""
    path, picture = tmp_path / "rows.csv", tmp_path / "demo.svg"
    write_rows(path, rows)

    draw(path, picture)

    text = picture.read_text(encoding="utf-8")
    for expected in (
        "tokens",
        "GiB",
        "budget 0.57 GiB",
        "a plan for every length",
        "imagined",
        "prediction",
    ):
        assert expected in text


def test_labels_keep_their_distance() -> None:
    """Labels move up from the lowest until none covers another."""
    heights = {"a": 1.0, "b": 0.0, "c": 0.1, "d": 0.15}

    assert spread(heights, 0.3) == pytest.approx({"b": 0.0, "c": 0.3, "d": 0.6, "a": 1})
