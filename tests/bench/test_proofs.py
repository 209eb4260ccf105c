"""What proofs print and write is what was measured; each runs in its smallest form."""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import json

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import (
    common,
    faults,
    models,
    plangap,
    prediction,
    soak,
    tight,
)
from benchmarks.proofs.__main__ import main
from benchmarks.proofs.common import Answer, Bar, Settings


def test_publish(tmp_path, capsys):
    """Rows go to a CSV file, measurements first; the last line is the document."""
    rows = [{**Settings().provenance(), "model": "bert", "reason": None}]
    answer = Answer(
        rows=rows, table=[{"model": "bert", "use": 0.123456}], bars=[Bar("over", 1, 0)]
    )

    common.publish("soak", answer, tmp_path)

    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    with (tmp_path / "soak.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert ["model", "bert"] == [line.split()[0] for line in lines[:2]]
    assert (False, 1) == (document["holds"], document["bars"][0]["value"])
    assert ["model", "reason", "seed"] == list(row)[:3]
    assert ("bert", "") == (row["model"], row["reason"])
    assert row["torch"] and row["device"] and row["date"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["soak", "--models", "lstm"], "--models lstm: choose among bert"),
        (["soak", "--device", "abacus"], "--device abacus: torch knows no such"),
    ],
)
def test_what_cannot_be_asked(arguments, complaint, tmp_path, capsys):
    """One line and exit status 2, before anything is measured."""
    assert main([*arguments, "--out", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"python -m benchmarks.proofs: {complaint}")
    assert 1 == error.count("\n")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.sim
@pytest.mark.slow
def test_rows_that_follow_lengths(tmp_path):
    """The sampler's batches train within the budget, and the table tells how fast."""
    options = ["--places", "bert-large-16", "--parts", "c", "--steps", "3"]
    assert 0 == main(["fill", *options, "--out", str(tmp_path)])

    (row,) = common.read(tmp_path / "fill.csv")
    assert ("c", 3, 0, 0) == tuple(
        row[name] for name in ("part", "n_steps", "ooms", "over")
    )
    assert 0.0 <= row["padding"] < 0.2
    assert row["tokens_per_second_all"] > 0.0


@pytest.mark.sim
@pytest.mark.slow
def test_two_models_train_by_turns(tmp_path):
    """Each row tells what both models' steps took, of the same batch."""
    options = ["--parts", "full", "--workloads", "bert-large", "--steps", "2"]
    main(["host", *options, "--out", str(tmp_path)])

    rows = common.read(tmp_path / "host.csv")
    assert [0, 1] == [row["step"] for row in rows]
    assert all(min(row["seconds"], row["other_seconds"]) > 0.0 for row in rows)


# ------------------------------------------------------------------ in this process

_GPT2 = models.ModelSpec("gpt2", {"batch": (4, 4), "length": (32, 192)})
_SMALLEST = {
    "hard": {"pairs": 2, "fine": False, "all": False, "hard": True},
    "prediction": {"pairs": 2, "fine": False, "all": False, "hard": False},
    "soak": {"steps": 40, "limit": False},
    "tight": {"steps": 4},
    "plangap": {"problems": 6},
    "faults": {"faults": 12, "resume": False},
}
_OF_TIME_AND_SIZE = ("ms of CPU", "margin at", "p99", "planned, of")
"""Two pairs have no percentile, and what is learned by then depends on the thread."""


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _SMALLEST)
def test_each_runs(sim, name, monkeypatch, tmp_path):
    """Rows and bars come of a small model in few steps; what must hold, holds."""
    module = "prediction" if name == "hard" else name
    proof = importlib.import_module(f"benchmarks.proofs.{module}")
    monkeypatch.setattr(
        common, "run_child", lambda _module, task, _threads: proof.work(task)
    )
    monkeypatch.setattr(proof, "_SPECS", {"gpt2": _GPT2}, raising=False)
    monkeypatch.setattr(prediction, "_LEAST_DEVICE_GROWTH_BYTES", 2**20)
    monkeypatch.setattr(soak, "_N_SEEN", 6)
    monkeypatch.setattr(plangap, "_TIMED", 1)
    monkeypatch.setattr(plangap, "_SIZES", ((24, 5),))
    monkeypatch.setattr(prediction, "_LEAST_GROWTH_BYTES", 2**20)
    monkeypatch.setattr(tight, "_SHARE", 0.34)

    where = "cpu" if name == "hard" else "sim"
    sim.set_expandable_segments(True)  # segments of 20 MiB are coarse here
    models = ("accumulation",) if name == "hard" else ()
    settings = Settings(device=where, out=tmp_path, models=models)
    answer = proof.ask(settings, argparse.Namespace(**_SMALLEST[name]))

    assert answer.rows
    assert answer.table
    missed = [bar.what for bar in answer.bars if not bar.holds]
    assert [] == [
        what for what in missed if not any(each in what for each in _OF_TIME_AND_SIZE)
    ]


@pytest.mark.sim
@pytest.mark.slow
def test_faults_are_counted_until_a_run_is_stopped(sim, monkeypatch, tmp_path):
    """What was tried is in the table and in the file; the next run goes on from it."""

    def stopped(_module, task, _threads):
        yield from itertools.islice(faults.work(task), 2)
        raise KeyboardInterrupt

    def ask(resume):
        options = argparse.Namespace(faults=3, resume=resume)
        answer = faults.ask(Settings(device="sim", out=tmp_path), options)
        return sum(line["trials"] for line in answer.table), answer.bars[0]

    monkeypatch.setattr(common, "run_child", stopped)
    (n_first, few), kept = ask(resume=False), common.read(tmp_path / "faults.csv")
    monkeypatch.setattr(common, "run_child", lambda _m, task, _t: faults.work(task))
    n_last, enough = ask(resume=True)

    assert (n_first, False) == (sum(row["trials"] for row in kept), few.holds)
    assert n_last > n_first and enough.holds
