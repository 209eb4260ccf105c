"""A first look at a device: lines, rows as they come, and the script around them."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import check
from benchmarks.check import HOLDS, INFORMATION, MISSED, device, library
from benchmarks.proofs import check as proof
from benchmarks.proofs.common import Settings
from mimose.records import StepRecord

ROOT = Path(__file__).resolve().parents[2]
needs_checkout = pytest.mark.skipif(
    not (ROOT / "scripts" / "gpu").exists(), reason="runs in a checkout"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (check.equal("size", 64, 63), (MISSED, "63")),
        (check.at_most("share", 0.5, 0.5, "{:.0%}"), (HOLDS, "50%")),
        (check.at_most("share", 0.5, 0.51, "{:.0%}"), (MISSED, "51%")),
        (check.at_most("share", 0.5, None, "{:.0%}"), (MISSED, "nothing")),
        (check.told("name", "card"), (INFORMATION, "card")),
    ],
)
def test_verdicts(line, expected):
    """A limit holds at itself, and is missed where nothing was seen."""
    assert expected == (line.verdict, line.seen)


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
    with (folder / "check.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


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


def test_no_group_begins_without_time(tmp_path):
    """What there is no time for is told, group by group, and nothing is missed."""
    assert _ask(tmp_path, limit_seconds=0.0).bars[0].holds
    assert ["not possible here: no time was left for it"] * 2 == [
        row["verdict"] for row in _read(tmp_path)
    ]


def test_a_process_that_hangs_is_a_line(monkeypatch):
    """It is ended when its time is over."""
    group = check.Group("device", "meter", limit_seconds=0.01)
    monkeypatch.setitem(check.GROUPS, "meter", group)

    (line,) = proof.lines_of(Settings(device="cpu"), "meter", 60.0)

    assert MISSED == line.verdict
    assert "took more than 0.01 s" in line.seen


@pytest.mark.parametrize(
    ("other", "again", "verdict"),
    [
        (1.0, 9.0, "holds"),
        (2.0, 1.0, "MISSED"),
        (2.0, 1.5, "not possible here: two bare runs differ, by at most 0.5"),
    ],
)
def test_bare_runs_that_differ_are_told_apart(other, again, verdict):
    """Only where two bare runs agree can weights that are off be held against us."""
    bare = iter([1.0, again])
    before = torch.are_deterministic_algorithms_enabled()
    try:
        line = library.same_weights(
            "weights",
            lambda is_bare: [torch.tensor([next(bare) if is_bare else other])],
        )
    finally:
        torch.use_deterministic_algorithms(before)

    assert verdict == line.verdict


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


def test_waits_of_cuda_are_its_warnings_and_explicit_calls(monkeypatch):
    """Each warning counts, each call that waits counts, and all is put back."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    before = torch.accelerator.synchronize

    def step():
        for text in ("a synchronizing CUDA operation",) * 2 + ("something else",):
            warnings.warn(f"called {text}", stacklevel=1)
        torch.accelerator.synchronize()

    assert 3 == device.cuda_waits(step)
    assert before is torch.accelerator.synchronize
    assert ["default", "warn", "default"] == modes


def _script(*arguments, **environment):
    values = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", str(ROOT / "scripts" / "gpu"), *arguments]
    return subprocess.run(
        command, env=values, capture_output=True, text=True, check=False
    )


@needs_checkout
def test_script_refuses_an_unknown_part():
    """It names the parts there are."""
    done = _script("everything")

    assert 2 == done.returncode
    assert "check, tests, proofs or bench" in done.stderr


@needs_checkout
def test_script_names_what_is_missing_and_takes_wheels(tmp_path):
    """It tells what a bare interpreter lacks; what a wheel brings it does not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "cachetools-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("cachetools/__init__.py", "")

    for folder, missing in (
        ("", "torch numpy scipy scikit-learn cachetools"),
        (str(wheels), "torch numpy scipy scikit-learn"),
    ):
        done = _script("check", PYTHON=str(python), PYTHONPATH="", WHEELS=folder)
        assert 2 == done.returncode
        assert f"missing on this machine: {missing}\n" in done.stderr
