"""One command for a card: rows come at once, time is kept, and all cells have a row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.proofs import common, gpu
from benchmarks.proofs.__main__ import main
from mimose.bench.child import RunFailedError

ROOT = Path(__file__).resolve().parents[2]
_TWO = ["--cells", "bert-large-16/whole", "bert-large-16/hf", "--cudnn", "on"]


def test_a_process_that_dies_leaves_its_rows(monkeypatch, tmp_path):
    """The rows so far stay, one says how it ended, and `--resume` runs it again."""
    started = []

    def run_child(_module, task, _threads, *, environment, limit_seconds):
        started.append(task["strategy"])
        assert {} == environment
        assert 0 < limit_seconds <= 105
        yield {"n_steps": 10}
        if task["strategy"] == "hf" and started.count("hf") == 1:
            rows = common.read(tmp_path / "gpu.csv")
            assert 10 == rows[-1]["n_steps"]  # before the process has ended
            msg = "gpu took more than 105 s\nand more"
            raise RunFailedError(msg)
        yield {"n_steps": 60, "ended": True}

    monkeypatch.setattr(common, "run_child", run_child)

    assert 1 == main(["gpu", *_TWO, "--out", str(tmp_path)])
    rows = common.read(tmp_path / "gpu.csv")
    assert ["", "", "", "gpu took more than 105 s"] == [r["why"] or "" for r in rows]
    assert 0 == main(["gpu", *_TWO, "--resume", "--out", str(tmp_path)])
    assert ["whole", "hf", "hf"] == started
    assert 6 == len(common.read(tmp_path / "gpu.csv"))


def test_what_no_time_is_left_for_has_a_row(monkeypatch, tmp_path):
    """No process begins, and each cell says why, with cuDNN on and off."""
    monkeypatch.setattr(common, "run_child", None)

    assert 1 == main(["gpu", "--limit-seconds", "1", "--out", str(tmp_path)])

    rows = common.read(tmp_path / "gpu.csv")
    assert {"left out: no time was left"} == {row["why"] for row in rows}
    assert 2 * len(gpu.CELLS) == len(rows)


@pytest.mark.sim
@pytest.mark.slow
def test_it_runs_on_the_hollow_card(tmp_path):
    """By the script, as on a card: a row after ten steps, and one at the end."""
    command = ["scripts/gpu", "steps", "--steps", "11", "--cudnn", "off"]
    command += ["--cells", "bert-large-16/whole"]
    where = {"DEVICE": "sim", "OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(command, cwd=ROOT, env={**os.environ, **where}, check=True)

    first, last = common.read(tmp_path / "gpu.csv")
    assert [10, 11] == [row["n_steps"] for row in (first, last)]
    assert [None, True] == [row["ended"] for row in (first, last)]
    assert (0, 0, 16) == tuple(last[name] for name in ("over", "ooms", "gib"))
    assert 0 < last["tokens_per_second"] < last["padded_tokens_per_second"]
    assert 0 < last["seen_seconds"] < 0.2  # virtual
    assert last["reserved_bytes"] <= 16 * 2**30
