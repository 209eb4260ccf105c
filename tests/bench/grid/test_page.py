"""A grid to look at."""

import io
import re
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from rich.console import Console

from mimose.bench.grid.looks import COLOURS
from mimose.bench.grid.page import write_page
from mimose.bench.grid.picture import draw_all
from mimose.bench.grid.registry import STRATEGIES
from mimose.bench.grid.summary import summarise
from mimose.bench.grid.table import show


def test_the_page_has_everything(grid, tmp_path):
    """A figure of prices, peaks and plans for each workload; a row for each cell."""
    path = tmp_path / "bench.html"
    write_page(grid, path)
    text = path.read_text()
    found = re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL)
    figures = dict(found)
    assert set(figures) == {"time0", "peaks0", "plans0"}
    names = set(re.findall(r'<button.*? data-key="(.*?)">', figures["time0"]))
    assert {"none", "full", "mimose"} <= names
    assert len(re.findall(r"<text.*>layer call \d</text>", figures["plans0"])) == 3
    assert text.count("<tr>") == 1 + len(summarise(grid))
    assert "needs CUDA" in text
    assert "default-src 'none'" in text


def test_plans_of_finer_actions_are_drawn(grid, tmp_path):
    """By the letters of the whole menu; only the actions that were used are named."""
    path = tmp_path / "bench.html"
    rows = [replace(row, plan=row.plan.replace("k", "l")) for row in grid]
    write_page(rows, path)
    (figure,) = re.findall(
        r'<section id="plans0">(.*?)</section>', path.read_text(), re.DOTALL
    )
    words = re.findall(r'<g data-key="(\w+):', figure)
    assert words == ["lean", "recompute"]


@pytest.mark.parametrize(
    ("factor", "where"), [(1, "the dashed line"), (1000, "beyond the picture")]
)
def test_a_headroom_that_is_not_drawn_is_no_line(factor, where, grid, tmp_path):
    """The caption speaks of the line only where there is one."""
    path = tmp_path / "bench.html"
    rows = [replace(r, headroom_bytes=(r.headroom_bytes or 0) * factor) for r in grid]
    write_page(rows, path)
    (figure,) = re.findall(
        r'<section id="peaks0">(.*?)</section>', path.read_text(), re.S
    )
    assert f" MiB, {where}." in figure
    assert ("the budget&#x27;s headroom" in figure) == (factor == 1)


def test_the_pictures_are_drawn(grid, tmp_path):
    """From the summaries alone: those that there are numbers for."""
    pytest.importorskip("matplotlib")
    drawn = draw_all(summarise(grid), tmp_path)
    assert drawn == {
        "picture": tmp_path / "bench.png",
        "published": tmp_path / "published.png",
    }
    assert all(path.stat().st_size > 10_000 for path in drawn.values())


def test_what_grows_has_a_picture_of_its_own(grid, tmp_path):
    """And no other."""
    pytest.importorskip("matplotlib")
    rows = [
        replace(row, workload=name)
        for name in ("lm-scaling", "lm-depth-3")
        for row in grid
    ]
    drawn = draw_all(summarise(rows), tmp_path)
    assert drawn == {"scaling": tmp_path / "scaling.png"}
    assert drawn["scaling"].stat().st_size > 10_000


def test_the_table_marks_who_breaks_the_budget(grid):
    """In brackets, and what could not run says so."""
    out = io.StringIO()
    show(summarise(grid), Console(file=out, width=120))
    text = out.getvalue()
    assert "[1.00×] 3 over" in text
    assert "1.20×" in text
    assert "not run" in text
    assert "failed" in text
    assert "autosac, tc-bert: needs CUDA" in text
    assert "mimose kept the budget in 1 of 1 cells" in text


@pytest.fixture
def chosen(grid, monkeypatch):
    """Rows of a strategy that chooses among all actions, a lossy one among them."""
    lossy = replace(STRATEGIES["mimose-all"], is_exact=False)
    monkeypatch.setitem(STRATEGIES, "mimose-all", lossy)
    mine = [row for row in grid if row.strategy == "mimose"]
    return [*grid, *(replace(row, strategy="mimose-all", plan="klrp") for row in mine)]


def test_what_was_chosen_among_all_actions_is_told(chosen, tmp_path):
    """In the text, in a picture, and layer by layer on the page."""
    pytest.importorskip("matplotlib")
    (cell,) = [s for s in summarise(chosen) if s.strategy == "mimose-all"]
    shares = (("keep", 0.25), ("lean", 0.25), ("pool", 0.25), ("recompute", 0.25))
    assert cell.action_shares == shares
    out = io.StringIO()
    show(summarise(chosen), Console(file=out, width=150))
    told = "mimose-all, tc-bert at 0.5: keep 25%, lean 25%, pool 25%, recompute 25%"
    assert told in out.getvalue()
    drawn = draw_all(summarise(chosen), tmp_path)
    assert drawn["actions"] == tmp_path / "actions.png"
    assert drawn["actions"].stat().st_size > 10_000
    path = tmp_path / "bench.html"
    write_page(chosen, path)
    assert '<section id="all0">' in path.read_text()


def test_who_is_lossy_is_marked(chosen, tmp_path):
    """In the table and on the page; the others are not."""
    out = io.StringIO()
    show(summarise(chosen), Console(file=out, width=150))
    assert "mimose-all (lossy)" in out.getvalue()
    assert "mimose (lossy)" not in out.getvalue()
    assert "gradients are others than plain training's" in out.getvalue()
    path = tmp_path / "bench.html"
    write_page(chosen, path)
    assert "mimose-all (lossy)" in path.read_text()


def test_every_strategy_has_a_colour_of_its_own():
    """Or a legend could not tell two lines apart."""
    assert STRATEGIES.keys() == COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)
