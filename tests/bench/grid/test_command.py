"""Keeping a grid's rows: what is there is kept, put aside, or shown again."""

import dataclasses
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from mimose.bench.child import RunFailedError
from mimose.bench.grid import runner
from mimose.bench.grid.command import bench
from mimose.bench.grid.runner import GridRow, GridSettings
from mimose.bench.rows import read

SETTINGS = GridSettings(
    workloads=("tc-bert", "qa-bert"),
    strategies=("none", "mimose"),
    budgets=(0.5,),
    steps=4,
    warm_up=2,
    trace=tuple({"length": 10 * n} for n in range(1, 7)),
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
            def __init__(self, settings, name, on_step, *_):
                self.name, self.rows = name, []

            def run(self):
                self.rows = [dataclasses.replace(r, workload=self.name) for r in rows]
                if by_name[self.name] is not None:
                    self.rows = self.rows[:4]
                    raise by_name[self.name]

        monkeypatch.setattr(runner, "WorkloadRun", _Run)

    return endings


def _kept(folder):
    return {path.name: read(path, GridRow) for path in folder.glob("*.csv")}


@pytest.mark.parametrize(
    ("ending", "status"), [(KeyboardInterrupt(), 130), (RunFailedError("no plan"), 1)]
)
def test_what_ran_is_kept_and_shown(tmp_path, run, rows, capsys, ending, status):
    """However it ends; numbers are in a file, and words on the terminal."""
    run(**{"tc-bert": None, "qa-bert": ending})
    assert bench(SETTINGS, tmp_path) == status
    there = _kept(tmp_path)["rows.csv"]
    assert [row.workload for row in there] == ["tc-bert"] * len(rows) + ["qa-bert"] * 4
    output = capsys.readouterr()
    assert output.err.count("mimose bench: ") == 1
    assert "{" not in output.out
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["files"]["picture"] == str(tmp_path / "bench.png")
    mine = [c["keeps_budget"] for c in told["cells"] if c["strategy"] == "mimose"]
    assert mine == [True]
