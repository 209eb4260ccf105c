"""The proof of accuracy: arms are alike but for the action, and what is judged."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import digits
from benchmarks.proofs import accuracy
from benchmarks.proofs.accuracy import AccuracyRow
from benchmarks.proofs.common import Settings

N_IMAGES = 64


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps an epoch, of small images."""
    load = digits.load

    def some(fold: int = 0) -> tuple[digits.Images, ...]:
        return tuple(
            digits.Images(part.pixels[:N_IMAGES], part.labels[:N_IMAGES])
            for part in load(fold)
        )

    monkeypatch.setattr(digits, "load", some)
    monkeypatch.setattr(accuracy, "_SIDES", (32,))
    monkeypatch.setattr(accuracy, "_SIDE", 32)


def _work(arm: str) -> list[dict[str, Any]]:
    task = {"arm": arm, "runs": 2, "epochs": 2, "seed": 0, "device": "cpu"}
    return [dict(told) for told in accuracy.work(task)]


@pytest.mark.usefixtures("few")
def test_arms_differ_in_nothing_but_the_action() -> None:
    """Under an exact action every loss is the bare model's; of two runs it is not."""
    exact, lean = _work(accuracy.EXACT), _work("lean")
    for name in ("run", "epoch", "loss", "right", "held_out"):
        assert [told[name] for told in exact] == [told[name] for told in lean]
    first, second = (told["loss"] for told in lean if told["epoch"] == 1)
    assert first != second


def _rows(arm: str, right: list[int]) -> list[AccuracyRow]:
    fields = {"arm": arm, "epochs": 10, "epoch": 10, "loss": 0.1, "held_out": 1000}
    provenance = Settings().provenance()
    return [
        AccuracyRow(run=run, right=each, **fields, **provenance)
        for run, each in enumerate(right)
    ]


def test_differences_are_taken_run_by_run() -> None:
    """Runs differ more than arms do; the interval is that of the differences."""
    exact = _rows("exact", [990, 950, 970])
    line = accuracy.compare(_rows("pool", [986, 946, 969]), exact)
    assert line["accuracy %"] == 96.7
    assert line["to exact"] == "-0.30"
    assert line["95%"] == "±0.43"  # Student's 4.303 with two degrees of freedom
