"""The proof of accuracy: arms are alike but for the action, and what is judged."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import accuracy

N_IMAGES = 64


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps an epoch, of small images."""
    load = accuracy.load

    def some(fold: int) -> tuple[dict[str, Any], ...]:
        return tuple(
            {name: each[:N_IMAGES] for name, each in part.items()}
            for part in load(fold)
        )

    monkeypatch.setattr(accuracy, "load", some)
    monkeypatch.setattr(accuracy, "_SIDES", (32,))
    monkeypatch.setattr(accuracy, "_SIDE", 32)


def _work(arm: str) -> list[dict[str, Any]]:
    task = {"arm": arm, "runs": 2, "epochs": 2, "seed": 0, "device": "cpu"}
    return [dict(told) for told in accuracy.work(task)]


@pytest.mark.usefixtures("few")
def test_arms_differ_in_nothing_but_the_action() -> None:
    """Under an exact action every loss is the bare model's; of two runs it is not."""
    exact, selective = _work(accuracy.EXACT), _work("selective")
    for name in ("run", "epoch", "loss", "right", "held_out"):
        assert [told[name] for told in exact] == [told[name] for told in selective]
    first, second = (told["loss"] for told in selective if told["epoch"] == 1)
    assert first != second
