"""What the documentation says of the grid is what its rows say."""

import io
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

from rich.console import Console

from mimose.bench.grid.runner import GridRow
from mimose.bench.grid.summary import compare, sentences, show, summarise
from mimose.bench.rows import read

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "docs" / "results" / "cpu" / "bench.csv"

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="runs in a checkout")


@pytest.fixture(scope="module")
def cells():
    """The cells of the rows that the documentation quotes."""
    return summarise(read(ROWS, GridRow))


def test_the_results_come_from_the_rows(cells):
    """Every line of the table, and every comparison."""
    text = (ROOT / "docs" / "results" / "small.md").read_text(encoding="utf-8")
    out = io.StringIO()
    show(cells, Console(file=out, width=200))
    overview = out.getvalue().partition("All cells")[2]
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        (line,) = (each for each in overview.splitlines() if f" {strategy} " in each)
        numbers = line.removeprefix(f" {strategy} ").split("  ")
        said = " | ".join(number.strip() for number in numbers if number.strip())
        assert f"| {strategy} | {said} |" in text
    for sentence in sentences(cells):
        assert not sentence.startswith("mimose") or f"- {sentence}\n" in text


def test_the_readme_comes_from_the_rows(cells):
    """How it compares."""
    static, full, oracle = (
        compare(cells, name) for name in ("static", "hf-full", "oracle")
    )
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"takes {1 - full.seconds.value:.0%} less time than checkpointing",
        f"{1 - static.seconds.value:.0%} less than one static plan",
        f"{oracle.seconds.value - 1:.0%} more than an oracle",
    ):
        assert said in text
