"""A first look at a device: lines, rows as they come, and the script around them."""

from __future__ import annotations

import argparse

import torch

from benchmarks import check
from benchmarks.check import HOLDS, INFORMATION, MISSED, device, library
from benchmarks.proofs import check as proof
from benchmarks.proofs.common import Settings, read
from mimose.records import StepRecord


def test_a_failing_group_ends_in_a_line(monkeypatch):
    """Its lines so far stay, and its error's first line is seen."""

    def meter(device):
        yield check.told("before", 1)
        msg = "no such kernel\nat line 7"
        raise RuntimeError(msg)

    monkeypatch.setattr(device, "meter", meter)

    lines = list(check.run_group("meter", torch.device("cpu")))

    assert [INFORMATION, MISSED] == [line.verdict for line in lines]
    assert "RuntimeError: no such kernel" == lines[1].seen


def _read(folder):
    path = folder / "check.csv"
    return read(path) if path.exists() else []


def _ask(folder, limit_seconds=60.0):
    options = {"device": "cpu", "groups": ["meter", "waits"]}
    asked = argparse.Namespace(limit_seconds=limit_seconds, **options)
    return proof.ask(Settings(out=folder), asked)


def test_rows_are_kept_as_they_come(monkeypatch, tmp_path):
    """Each row is in the file before the next line is looked at."""
    counts = []

    def lines(settings, name, left_seconds):
        for index in range(2):
            counts.append(len(_read(tmp_path)))
            yield check.equal(f"{name} {index}", 0, index)

    monkeypatch.setattr(proof, "lines_of", lines)

    answer = _ask(tmp_path)

    assert [0, 1, 2, 3] == counts
    assert [HOLDS, MISSED] * 2 == [row["verdict"] for row in _read(tmp_path)]
    assert (2, False) == (answer.bars[0].value, answer.bars[0].holds)


def _record(step, error, phase="plan"):
    return StepRecord(
        step=step,
        shape={},
        phase=phase,
        actions=(),
        budget_bytes=4000,
        start_bytes=1000,
        predicted_peak_bytes=2000,
        observed_peak_bytes=round(2000 + 1000 * error),
    )


def test_first_planned_steps_are_judged_apart():
    """Their errors are told; later ones, both ways, are held against bars."""
    errors = [0.5, *[0.0] * 9, *[0.001] * 9, -0.03]
    records = [_record(0, 9.0, "collect"), *map(_record, range(1, 21), errors)]

    planned, first, p99, low = library.errors_told("model", records)

    assert (HOLDS, "20") == (planned.verdict, planned.seen)
    assert (INFORMATION, "50.00%") == (first.verdict, first.seen)
    assert (MISSED, "3.00%") == (p99.verdict, p99.seen)
    assert (HOLDS, "0.10%") == (low.verdict, low.seen)
