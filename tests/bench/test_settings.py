"""The proof of training settings judges what came of each, and runs in small."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.proofs import settings as proof
from benchmarks.proofs.common import Answer, Settings
from benchmarks.proofs.settings.apart import DiedError, apart
from benchmarks.proofs.settings.case import SETTINGS, World

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "patterns.md"


def _row(**changes: Any) -> proof.SettingRow:
    fields = {
        "setting": "gan",
        "what": "Two models.",
        "outcome": "planned",
        "expected": "planned",
        "says": "",
        "message": "",
        "reasons": "{}",
        "steps": 24,
        "records": 24,
        "phases": "{}",
        "first_plan": 7,
        "planned": 17,
        "mixed": 9,
        "recomputed": 60,
        "calls": 144,
        "retries": 0,
        "units": 6,
        "least_bytes": 10,
        "most_bytes": 20,
        "budget_bytes": 15,
        "peak_bytes": 14,
        "left_bytes": 0,
        "over": 0,
        "is_equal": True,
        "different": "[]",
        "cached_plan_seconds": 3e-4,
        "new_plan_seconds": 2e-3,
    }
    settings = Settings(device="sim")
    return proof.SettingRow(**{**fields, **changes}, **settings.provenance())


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, 0),
        ({"outcome": "error", "is_equal": None}, 1),
        ({"outcome": "recomputed"}, 1),
        ({"says": "two backwards"}, 1),
        ({"says": "two backwards", "reasons": '{"two backwards": 3}'}, 0),
        ({"is_equal": False}, 1),
        ({"over": 1}, 1),
    ],
)
def test_bars(changes: dict[str, Any], missed: int) -> None:
    """Another outcome, other results, a step over: each misses its bar."""
    bars = proof._judge([_row(), _row(**changes)])
    assert missed == sum(not bar.holds for bar in bars)


def test_notes_and_table() -> None:
    """A refusal is told by its error, and times in microseconds."""
    rows = [_row(), _row(outcome="refused", message="BudgetError: too small\nmore")]
    assert "BudgetError: too small" == proof._summarise(rows[1])["said"]
    assert "plan_seconds, from the cache, median: 300 µs" in proof._notes(rows)


def test_settings_are_many_and_described() -> None:
    """At least thirty settings, each with a sentence that no other has."""
    sentences = {setting.what for setting in SETTINGS.values()}
    assert len(SETTINGS) >= 30
    assert len(sentences) == len(SETTINGS)
    assert all(sentence.endswith(".") for sentence in sentences)


@pytest.mark.skipif(not _PAGE.exists(), reason="runs in a checkout")
def test_every_setting_is_in_the_docs() -> None:
    """The page on ways to train names each, and none that is not tried."""
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.rsplit("|", 2)[1] for line in lines if line.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    assert set(SETTINGS) == named


def test_data_is_settled_by_the_seed() -> None:
    """Two worlds of one seed draw the same, of another not."""
    drawn = [World("cpu", seed).ids(64) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_work_apart() -> None:
    """What a copy of the process finds comes back; its end is told as an error."""
    assert [1, 2] == apart(lambda: [1, 2])
    with pytest.raises(DiedError, match="the process ended with 3"):
        apart(lambda: os._exit(3))


@pytest.fixture
def run(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Train in some settings, on the device in this very process."""

    def ask(*cases: str, steps: int) -> Answer:
        monkeypatch.setattr(
            "benchmarks.proofs.common.run_child", lambda _, task, __: proof.work(task)
        )
        monkeypatch.setattr(proof, "apart", lambda work: work())
        options = argparse.Namespace(cases=cases, steps=steps)
        return proof.ask(Settings(device="sim"), options)

    return ask


@pytest.mark.sim
def test_settings_run(run: Callable[..., Answer]) -> None:
    """One that is planned, one that is not, and one that is refused."""
    answer = run("two-towers", "rows-by-content", "compiled-model", steps=9)

    assert ["planned", "recomputed", "refused"] == [row.outcome for row in answer.rows]
    assert [] == [str(bar) for bar in answer.bars if not bar.holds]
