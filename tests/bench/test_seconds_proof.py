"""The proof of seconds: which steps are compared, and what is judged of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from mimose.bench.proofs import seconds
from mimose.bench.proofs.common import Settings


def _rows(step, *, by_seconds, by_flops, is_ordinary=True):
    """Make the rows of a step in which 0.1 s were predicted."""
    told = {"bare": None, "seconds": by_seconds, "flops": by_flops}
    return [
        seconds.SecondsRow(
            model="bert",
            actions="keep lean recompute",
            budget_share=0.35,
            arm=arm,
            step=step,
            sizes="{}",
            plan="",
            is_ordinary=is_ordinary or arm == "bare",
            predicted_extra_seconds=None if extra is None else 0.1,
            extra_seconds=extra,
            step_seconds=1.0 + (extra or 0.0),
            **Settings().provenance(),
        )
        for arm, extra in told.items()
    ]


def test_what_is_compared_is_judged():
    """Errors are of both plans, the ratio is of their sums; a bar may be missed."""
    rows = [
        *_rows(0, by_seconds=0.1, by_flops=0.2),
        *_rows(1, by_seconds=0.1, by_flops=0.1),
        *_rows(2, by_seconds=9.0, by_flops=0.1, is_ordinary=False),
    ]
    line, bars = seconds._judge(rows, is_two=False)
    assert 2 == line["steps"]
    assert 2 / 3 == pytest.approx(line["ratio"])
    assert "+10.0%" == line["whole steps: by seconds"]
    assert [True, False, True] == [bar.holds for bar in bars]


def test_steps_of_one_alone_are_not_compared():
    """Where one of the three is missing there is nothing to compare."""
    rows = _rows(0, by_seconds=0.1, by_flops=0.1)[:2]
    line, bars = seconds._judge(rows, is_two=False)
    assert 0 == line["steps"]
    assert not any(bar.holds for bar in bars)
