"""The demonstration's picture is made from the rows alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from mimose.bench.grid.demo_picture import draw, spread
from mimose.bench.grid.runner import GridRow
from mimose.bench.rows import write


@pytest.fixture
def rows(grid: list[GridRow], make_row: object) -> list[GridRow]:
    """The rows of a grid, and plain training's under a limit, which fails."""
    limited = [
        make_row("none", step, is_limited=True, problem="" if step < 2 else "failed")
        for step in range(3)
    ]
    return [row for row in grid if row.step >= 0] + limited


@pytest.mark.parametrize(
    "strategies", [("none", "mimose"), ("none", "full", "static", "mimose")]
)
def test_draws_from_the_file(
    rows: list[GridRow], tmp_path: Path, strategies: tuple[str, ...]
) -> None:
    """A picture comes of whatever strategies there are."""
    path, picture = tmp_path / "rows.csv", tmp_path / "new" / "demo.png"
    write(path, GridRow, [row for row in rows if row.strategy in strategies])

    draw(path, picture)

    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_says_what_is_seen(rows: list[GridRow], tmp_path: Path) -> None:
    """Units, budget, strategies and the machine are written on the picture."""
    path, picture = tmp_path / "rows.csv", tmp_path / "demo.svg"
    write(path, GridRow, rows)

    draw(path, picture)

    text = picture.read_text(encoding="utf-8")
    for expected in (
        "tokens",
        "MiB",
        "budget 35 MiB",
        "a plan for every length",
        "cpu: none",
        "prediction",
        "none took 2 of 6 steps",
        "mimose kept all 4 steps within the budget",
    ):
        assert expected in text


def test_labels_keep_their_distance() -> None:
    """Labels move up from the lowest until none covers another."""
    heights = {"a": 1.0, "b": 0.0, "c": 0.1, "d": 0.15}

    assert spread(heights, 0.3) == pytest.approx({"b": 0.0, "c": 0.3, "d": 0.6, "a": 1})
