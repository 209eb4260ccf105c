"""A first look at a device: lines, rows as they come, and the script around them."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.check import groups, meter, waits
from benchmarks.check.exactness import same_weights
from benchmarks.check.groups import GROUPS, Group, run_group
from benchmarks.check.line import (
    HOLDS,
    INFORMATION,
    MISSED,
    Line,
    at_most,
    equal,
    impossible,
    told,
)
from benchmarks.check.prediction import errors_told
from benchmarks.check.training import Room
from benchmarks.proofs import check
from benchmarks.proofs.common import Settings, format_table
from benchmarks.sim import why_not
from mimose.records import StepRecord

ROOT = Path(__file__).resolve().parents[2]
needs_sim = pytest.mark.skipif(bool(why_not()), reason=why_not() or "sim is there")
needs_checkout = pytest.mark.skipif(
    not (ROOT / "scripts" / "gpu").exists(), reason="runs in a checkout"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (equal("size", 64, 64), (HOLDS, "64")),
        (equal("size", 64, 63), (MISSED, "63")),
        (at_most("share", 0.5, 0.5, "{:.0%}"), (HOLDS, "50%")),
        (at_most("share", 0.5, 0.51, "{:.0%}"), (MISSED, "51%")),
        (at_most("share", 0.5, None, "{:.0%}"), (MISSED, "nothing")),
        (told("name", "card"), (INFORMATION, "card")),
        (impossible("driver", "none"), ("not possible here: none", "")),
    ],
)
def test_verdicts(line: Line, expected: tuple[str, str]) -> None:
    """A limit holds at itself, and is missed where nothing was seen."""
    assert expected == (line.verdict, line.seen)


def test_a_failing_check_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines so far stay, its error's first line is seen, the next check runs."""

    def no_good(device: torch.device) -> Iterator[Line]:
        yield told("before", 1)
        msg = "no such kernel\nat line 7"
        raise RuntimeError(msg)

    def good(device: torch.device) -> Iterator[Line]:
        yield equal("after", device.type, "cpu")

    monkeypatch.setattr(meter, "CHECKS", (no_good, good))

    lines = list(run_group(GROUPS["meter"], torch.device("cpu")))

    assert ["before", "no good", "after"] == [line.what for line in lines]
    assert [INFORMATION, MISSED, HOLDS] == [line.verdict for line in lines]
    assert "RuntimeError: no such kernel" == lines[1].seen


def _read(folder: Path) -> list[dict[str, str]]:
    with (folder / "check.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _options(**changes: object) -> argparse.Namespace:
    """Return parsed options of the check."""
    values = {"device": "cpu", "limit_seconds": 60.0, "groups": ["meter", "waits"]}
    return argparse.Namespace(**{**values, **changes})


def test_rows_are_kept_as_they_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each row is in the file before the next line is looked at."""
    counts = []

    def lines(settings: Settings, group: Group, left: float) -> Iterator[Line]:
        for index in range(2):
            counts.append(len(_read(tmp_path)))
            yield equal(f"{group.name} {index}", 0, index)

    monkeypatch.setattr(check, "_lines", lines)

    answer = check.ask(Settings(out=tmp_path), _options())

    assert [0, 1, 2, 3] == counts
    assert ["meter", "meter", "waits", "waits"] == [r["group"] for r in _read(tmp_path)]
    assert [HOLDS, MISSED] * 2 == [row["verdict"] for row in _read(tmp_path)]
    assert (2, False) == (answer.bars[0].value, answer.bars[0].holds)
    assert ["group", "what", "expected", "seen", "verdict"] == list(answer.table[0])


def test_no_group_begins_without_time(tmp_path: Path) -> None:
    """What there is no time for is told, group by group, and nothing is missed."""
    answer = check.ask(Settings(out=tmp_path), _options(limit_seconds=0.0))

    assert answer.bars[0].holds
    assert ["not possible here: no time was left for it"] * 2 == [
        row["verdict"] for row in _read(tmp_path)
    ]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group("meter", "meter", limit_seconds=0.01), "took more than 0.01 s"),
        (Group("no such group", "meter"), "KeyError: 'no such group'"),
    ],
)
def test_a_dead_process_is_a_line(group: Group, expected: str) -> None:
    """One that hangs is ended; why a process died is seen."""
    (line,) = check._lines(Settings(device="cpu"), group, 60.0)

    assert MISSED == line.verdict
    assert expected in line.seen


def test_groups_name_modules() -> None:
    """Each group has checks, and so has each module that is a group."""
    listed = {group.module for group in GROUPS.values()}
    found = {
        path.stem
        for path in Path(groups.__file__).parent.glob("*.py")
        if "\nCHECKS = (" in path.read_text(encoding="utf-8")
    }

    assert found == listed
    assert all(name == group.name for name, group in GROUPS.items())


@pytest.mark.parametrize(
    ("other", "again", "expected"),
    [
        (1.0, 9.0, "holds: equal"),
        (2.0, 1.0, "MISSED: off by at most 1"),
        (
            2.0,
            1.5,
            "not possible here: two bare runs differ, by at most 0.5: off by at most 1",
        ),
    ],
)
def test_bare_runs_that_differ_are_told_apart(
    other: float, again: float, expected: str
) -> None:
    """Only where two bare runs agree can weights that are off be held against us."""
    bare = iter([1.0, again])

    line = same_weights(
        "weights",
        lambda: [torch.tensor([other])],
        lambda: [torch.tensor([next(bare)])],
    )

    assert expected == f"{line.verdict}: {line.seen}"


def _record(step: int, error: float, phase: str = "plan") -> StepRecord:
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


def test_first_planned_steps_are_judged_apart() -> None:
    """Their errors are told; later ones, both ways, are held against bars."""
    errors = [0.5, *[0.0] * 9, *[0.001] * 9, -0.03]
    records = [_record(0, 9.0, "collect"), *map(_record, range(1, 21), errors)]

    planned, first, p99, low = errors_told("model", records)

    assert (HOLDS, "20") == (planned.verdict, planned.seen)
    assert (INFORMATION, "50.00%") == (first.verdict, first.seen)
    assert (MISSED, "3.00%") == (p99.verdict, p99.seen)
    assert (HOLDS, "0.10%") == (low.verdict, low.seen)


def test_room() -> None:
    """A budget leaves a share of the growth; a peak uses a share of that."""
    room = Room(base_bytes=100, growth_bytes=400)

    assert 300 == room.budget(0.5)
    assert 0.75 == room.used(250, 300)


def test_waits_of_cuda_are_its_warnings_and_explicit_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each warning counts, each call that waits counts, and all is put back."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    before = torch.accelerator.synchronize

    def step() -> None:
        for text in ("a synchronizing CUDA operation",) * 2 + ("something else",):
            warnings.warn(f"called {text}", stacklevel=1)
        torch.accelerator.synchronize()

    assert 3 == waits._cuda_waits(step)
    assert before is torch.accelerator.synchronize
    assert ["default", "warn", "default"] == modes


def test_words_begin_at_the_left() -> None:
    """A table of words is read from the left, one of numbers from the right."""
    table = [{"a": "x", "b": "yes"}, {"a": "long", "b": ""}]

    assert ["a     b", "x     yes", "long"] == format_table(table, is_text=True)
    assert ["   a    b", "   x  yes", "long"] == format_table(table)


_BARE = """
import sys
for name in ("transformers", "tokenizers", "pandas", "datasets", "matplotlib", "plotly",
             "rich", "accelerate", "lightning", "optuna", "filelock"):
    sys.modules[name] = None  # to import it is an error from here on
from benchmarks import sim
sim.use()
import torch
import benchmarks.proofs.__main__
from benchmarks.check import waits
from benchmarks.check.groups import GROUPS, run_group
waits._LENGTHS = 4  # enough for plans
for name in ("versions", "meter", "random", "waits"):
    for line in run_group(GROUPS[name], torch.device("sim", 0)):
        print(name, line.verdict, line.what, line.seen, sep="; ")
"""


@needs_sim
@pytest.mark.slow
def test_nothing_more_is_needed() -> None:
    """Core lines hold without transformers, pandas and all that only benches need."""
    done = subprocess.run(
        [sys.executable, "-c", _BARE], capture_output=True, text=True, check=False
    )

    assert 0 == done.returncode, done.stderr
    assert "waits; holds" in done.stdout
    assert "transformers missing" not in done.stdout  # it is there, and not imported
    assert MISSED not in done.stdout


def _script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    values: Mapping[str, str] = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", str(ROOT / "scripts" / "gpu"), *arguments]
    return subprocess.run(
        command, env=values, capture_output=True, text=True, check=False
    )


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter that sees no installed package."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@needs_checkout
def test_script_refuses_an_unknown_part() -> None:
    """It names the parts there are."""
    done = _script("everything")

    assert 2 == done.returncode
    assert "no part everything; choose check, tests, proofs or bench" in done.stderr


@needs_checkout
def test_script_names_what_is_missing(bare_python: str) -> None:
    """And the command that brings it."""
    done = _script("check", PYTHON=bare_python, PYTHONPATH="")

    missing = "torch numpy scipy scikit-learn cachetools"
    assert 2 == done.returncode
    assert f"missing on this machine: {missing}" in done.stderr
    assert f"pip download --no-deps -d wheels {missing}" in done.stderr
    assert "WHEELS=wheels scripts/gpu check" in done.stderr


@needs_checkout
def test_script_takes_wheels(bare_python: str, tmp_path: Path) -> None:
    """What a folder of wheels holds is not missing."""
    with zipfile.ZipFile(tmp_path / "cachetools-7-py3-none-any.whl", "w") as wheel:
        wheel.writestr("cachetools/__init__.py", "")

    done = _script("check", PYTHON=bare_python, PYTHONPATH="", WHEELS=str(tmp_path))

    assert 2 == done.returncode
    assert "missing on this machine: torch numpy scipy scikit-learn\n" in done.stderr


@needs_checkout
@needs_sim
@pytest.mark.slow
def test_script_checks_the_simulated_accelerator(tmp_path: Path) -> None:
    """A group in a process of its own; rows are where they are asked for."""
    groups = ("meter",)
    done = _script("check", "--groups", *groups, DEVICE="sim", OUT=str(tmp_path))

    rows = _read(tmp_path)
    assert 0 == done.returncode, done.stderr
    assert list(groups) == list(dict.fromkeys(row["group"] for row in rows))
    assert {"sim: simulated accelerator"} == {row["device"] for row in rows}
    assert "64 MiB: requested" in done.stdout
