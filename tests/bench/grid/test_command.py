"""Keeping a grid's rows: what is there is kept, put aside, or shown again."""

import dataclasses
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from mimose.bench.child import RunFailedError
from mimose.bench.grid import command
from mimose.bench.grid.command import bench, prepare, show_again
from mimose.bench.grid.runner import GridRow, GridSettings
from mimose.bench.rows import read, write

SETTINGS = GridSettings(
    workloads=("tc-bert", "qa-bert"),
    strategies=("none", "mimose"),
    budgets=(0.5,),
    steps=4,
    warm_up=2,
)


@pytest.fixture
def rows(grid):
    """All that these settings ask of tc-bert."""
    return [row for row in grid if row.strategy in ("none", "mimose")]


@pytest.fixture
def run(monkeypatch, rows):
    """Workloads that run as they are told: rows, and how it ended."""

    def endings(**by_name):
        class _Run:
            def __init__(self, settings, name, on_step):
                self.name, self.rows = name, []

            def run(self):
                ending = by_name[self.name]
                self.rows = [
                    dataclasses.replace(row, workload=self.name) for row in rows
                ]
                if ending is not None:
                    self.rows = self.rows[:4]
                    raise ending

        monkeypatch.setattr(command, "WorkloadRun", _Run)

    return endings


def _kept(folder):
    return {path.name: read(path, GridRow) for path in folder.glob("*.csv")}


def test_rows_that_would_be_replaced_are_put_aside(tmp_path, rows):
    """However often; where there is nothing but names of columns, nothing is."""
    path = tmp_path / "rows.csv"
    for n_rows in (2, 1, 0):
        write(path, GridRow, rows[:n_rows])
        assert prepare(SETTINGS, tmp_path, resume=False) == []
    assert {name: len(own) for name, own in _kept(tmp_path).items()} == {
        "rows.csv": 0, "rows.previous.csv": 2, "rows.previous1.csv": 1
    }  # fmt: skip


def test_resuming_keeps_what_is_done(tmp_path, rows):
    """Whole workloads; of another its steps are put aside."""
    prepare(SETTINGS, tmp_path, resume=False)
    partial = [dataclasses.replace(row, workload="qa-bert") for row in rows[:3]]
    write(tmp_path / "rows.csv", GridRow, [*rows, *partial])
    assert prepare(SETTINGS, tmp_path, resume=True) == rows
    assert len(_kept(tmp_path)["rows.previous.csv"]) == len(rows) + 3
    assert prepare(SETTINGS, tmp_path, resume=True) == rows
    assert "rows.previous1.csv" not in _kept(tmp_path)


def test_another_run_is_not_gone_on_with(tmp_path, monkeypatch):
    """Other settings, or another machine."""
    prepare(SETTINGS, tmp_path, resume=False)
    other = dataclasses.replace(SETTINGS, seed=1)
    with pytest.raises(ValueError, match="with seed=0, and this run has 1"):
        prepare(other, tmp_path, resume=True)
    monkeypatch.setattr(command, "describe_machine", lambda _: {"device": "abacus"})
    with pytest.raises(ValueError, match="abacus"):
        prepare(SETTINGS, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "qa-bert was interrupted: its rows are kept"),
        (RunFailedError("nothing to plan"), 1, "qa-bert: nothing to plan"),
    ],
)
def test_what_ran_is_kept(tmp_path, run, rows, capsys, ending, status, said):
    """However it ends, and it is shown."""
    run(**{"tc-bert": None, "qa-bert": ending})
    assert (
        bench(SETTINGS, tmp_path, prepare(SETTINGS, tmp_path, resume=False)) == status
    )
    there = _kept(tmp_path)["rows.csv"]
    assert [row.workload for row in there] == ["tc-bert"] * len(rows) + ["qa-bert"] * 4
    output = capsys.readouterr()
    assert said in output.err
    cells = json.loads(output.out.splitlines()[-1])["cells"]
    assert {cell["workload"] for cell in cells} >= {"tc-bert"}
    assert [c["keeps_budget"] for c in cells if c["strategy"] == "mimose"] == [True]


def test_an_error_of_ours_loses_no_rows(tmp_path, run):
    """It is raised, and the rows are there."""
    run(**{"tc-bert": ZeroDivisionError(), "qa-bert": None})
    with pytest.raises(ZeroDivisionError):
        bench(SETTINGS, tmp_path, prepare(SETTINGS, tmp_path, resume=False))
    assert len(_kept(tmp_path)["rows.csv"]) == 4


def test_rows_are_shown_again(tmp_path, rows, capsys):
    """With the page and the pictures; and whether another run ranks alike."""
    path, out = tmp_path / "rows.csv", tmp_path / "out"
    write(path, GridRow, rows)
    assert show_again(path, out, None) == 0
    output = capsys.readouterr()
    files = json.loads(output.out.splitlines()[-1])["files"]
    assert files["rows"] == str(path)
    assert (out / "bench.html").exists()
    write(path, GridRow, [])
    with pytest.raises(ValueError, match="has no rows"):
        show_again(path, out, None)


def _many(rows, seconds):
    """Return the rows ten times over, for turns enough."""
    return [
        dataclasses.replace(
            row,
            step=6 * again + row.step,
            is_measured=True,
            seconds=seconds.get(row.strategy, row.seconds),
        )
        for again in range(10)
        for row in rows
    ]


def test_two_runs_are_compared(tmp_path, grid, capsys):
    """Status 1 where they rank differently, or nothing can be ranked."""
    first, second = tmp_path / "rows.csv", tmp_path / "other.csv"
    rows = [row for row in grid if not row.problem]
    write(first, GridRow, _many(rows, {}))

    def against(seconds, some):
        write(second, GridRow, _many(some, seconds))
        status = show_again(first, tmp_path / "out", second)
        return status, capsys.readouterr().err

    assert against({}, rows) == (0, "both runs rank the strategies alike: 1 pairs\n")
    status, said = against({"mimose": 0.3}, rows)
    assert (status, "mimose is faster than full" in said) == (1, True)
    others = [dataclasses.replace(row, workload="qa-bert") for row in rows]
    status, said = against({}, others)
    assert (status, "no two strategies could be ranked" in said) == (1, True)


@pytest.mark.parametrize("n_rows", range(1, 19))
def test_rows_of_an_interrupted_run_are_shown(tmp_path, grid, capsys, n_rows):
    """Wherever it was, at several budgets."""
    rows = [row for row in grid if row.strategy in ("none", "mimose", "autosac")]
    rows = sorted(rows, key=lambda row: row.step)[:n_rows]
    more = [
        dataclasses.replace(row, budget_share=0.7)
        for row in rows
        if row.strategy == "autosac"
    ]
    path = tmp_path / "rows.csv"
    write(path, GridRow, [*rows, *more])
    assert show_again(path, tmp_path / "out", None) == 0
    assert capsys.readouterr().out
