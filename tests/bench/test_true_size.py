"""Models and cards of their true size: what the table of results has to show."""

from __future__ import annotations

import pytest

from benchmarks.proofs.__main__ import main
from benchmarks.proofs.common import read

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_beats_checkpointing_everything(tmp_path):
    """All batches fit, the budget holds, few steps are unplanned, and time is saved."""
    options = ["--workloads", "bert-large", "--gib", "16", "--expandable", "no"]
    options += ["--steps", "16", "--strategies", "hf", "whole", "--out", str(tmp_path)]
    assert 0 == main(["scale", *options])
    hf, ours = read(tmp_path / "scale.csv")
    assert ours["reruns"] <= 1
    assert ours["planned_share"] >= 0.9
    assert ours["error_p99"] <= 0.01
    assert ours["allocator_seconds"] <= 0.02 * ours["seconds"]
    assert ours["seconds"] <= 0.9 * hf["seconds"]
