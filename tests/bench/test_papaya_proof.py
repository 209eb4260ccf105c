"""PAPAYA's figures: what two lines a method say of them."""

from __future__ import annotations

import argparse

from benchmarks.proofs import papaya
from benchmarks.proofs.common import Settings


def test_every_verdict_is_right_and_points_left_out_are_predicted():
    """Of 20 methods, by both ways of saying it; series hold their bars or are refused.

    Nothing is trained, so what the documentation says of them is found again.
    """
    answer = papaya.ask(Settings(threads=1), argparse.Namespace())
    assert [] == [bar for bar in answer.bars if not bar.holds]
    methods = [row for row in answer.rows if row["part"] == "method"]
    series = [row for row in answer.rows if row["part"] == "series"]
    assert (20, 9) == (len(methods), len(series))
    assert 2 == sum(row["measured_times_plain"] > 1.0 for row in methods)
    assert 2 == sum(bool(row["refused"]) for row in series)
