"""The proof of accuracy: arms are alike but for the action, and what is judged."""

from __future__ import annotations

import argparse
from pathlib import Path
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
    """Under an exact action every loss is the bare model's, and every layer has it."""
    exact, lean = _work(accuracy.EXACT), _work("lean")
    for name in ("run", "epoch", "loss", "right", "held_out"):
        assert [told[name] for told in exact] == [told[name] for told in lean]
    assert {told["layers"] for told in lean} == {5}  # four blocks and the stem
    assert {told["limited"] for told in lean} == {0}
    first, second = (told["loss"] for told in lean if told["epoch"] == 1)
    assert first != second  # of two runs


def _rows(arm: str, right: list[int], epochs: int = 10) -> list[AccuracyRow]:
    return [
        AccuracyRow(
            arm=arm,
            run=run,
            epochs=epochs,
            epoch=epochs,
            loss=0.1,
            held_out=1000,
            right=each,
            layers=5,
            limited=0,
            seconds=1.0,
            **Settings().provenance(),
        )
        for run, each in enumerate(right)
    ]


def test_differences_are_taken_run_by_run() -> None:
    """Runs differ more than arms do; the interval is that of the differences."""
    exact = _rows("exact", [990, 950, 970])
    line = accuracy._line("pool", _rows("pool", [986, 946, 969]), exact, 1.1)
    assert line["accuracy %"] == 96.7
    assert line["to exact"] == "-0.30"
    assert line["95%"] == "±0.43"  # Student's 4.303 with two degrees of freedom
    assert line["epochs for exact's"] == 1.1


@pytest.mark.parametrize(
    ("right", "holds", "epochs", "factor"),
    [
        ([980] * 2, True, [10], 1.0),  # as good at once
        ([976] * 2, True, [10, 11], 1.1),  # 0.4 points lost
        ([970] * 2, True, [10, 11, 12], 1.2),  # a whole point, made up for in time
        ([900] * 2, False, [10, 11, 12, 13], None),  # it never gets there
    ],
)
def test_pooling_may_lose_half_a_point_or_take_longer(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    right: list[int],
    holds: bool,
    epochs: list[int],
    factor: float | None,
) -> None:
    """More epochs are tried one by one, to three tenths more."""
    asked: dict[str, list[int]] = {}

    def rows_of(*_: Any, arm: str, epochs: int, **__: Any) -> list[AccuracyRow]:
        asked.setdefault(arm, []).append(epochs)
        better = 5 * (epochs - 10)
        own = [980] * 2 if arm == accuracy.EXACT else [each + better for each in right]
        return [*_rows(arm, [0, 0], epochs=1), *_rows(arm, own, epochs)]

    monkeypatch.setattr(accuracy, "rows_of", rows_of)
    options = argparse.Namespace(arms=["pool", "pool4"], runs=2, epochs=10)
    answer = accuracy.ask(Settings(out=tmp_path), options)
    [bar] = answer.bars
    assert bar.holds == holds
    assert asked == {"exact": [10], "pool": epochs, "pool4": [10]}
    factors = [line["epochs for exact's"] for line in answer.table]
    assert factors == [None, factor, None]
