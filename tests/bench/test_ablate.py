"""The proof of what each part of the reserve is worth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.proofs import ablate, left_out
from benchmarks.proofs.__main__ import main
from benchmarks.proofs.models import ModelSpec
from mimose.bench.rows import read
from mimose.bench.step_meter import MeasuredStep
from mimose.decide.reserve import PredictedStep, Reserve
from mimose.records import StepRecord

ROWS = Path(__file__).parents[2] / "docs" / "results" / "sim" / "ablate.csv"


def _record(step: int, phase: str, actions: tuple[str, ...]) -> StepRecord:
    return StepRecord(
        step=step,
        shape={},
        phase=phase,
        actions=actions,
        budget_bytes=200,
        start_bytes=100,
        predicted_peak_bytes=150 if phase == "plan" else None,
        observed_peak_bytes=160,
        recomputed_flops=7,
    )


def test_a_run_is_summed_up() -> None:
    """Overshoot is of the worst step; use and errors of planned steps alone."""
    records = [
        _record(0, "collect", ("recompute",)),
        _record(1, "plan", ("keep", "recompute")),
        _record(2, "plan", ("keep", "keep")),
    ]
    measured = [MeasuredStep(100, peak, 0.0) for peak in (230, 180, 210)]

    summary = ablate._summary(measured, records, 200)

    assert (3, 2, 30) == (
        summary["steps"],
        summary["steps_over"],
        summary["overshoot_bytes"],
    )
    assert (0.8, pytest.approx(0.2)) == (summary["use"], summary["error_p99"])
    assert (21, 1) == (summary["recomputed_flops"], summary["first_plan"])


@pytest.mark.parametrize("part", ["margin", "margin beyond its floor"])
def test_a_margin_left_out_learns_nothing(part: str) -> None:
    """What it keeps free stays what it is, whatever a step came to."""
    reserve = left_out.reserve_without(part)
    before = reserve.allowed_growth(100.0)
    step = PredictedStep(
        context="text",
        predicted_bytes=100.0,
        observed_bytes=150.0,
        headroom_bytes=100.0,
        scale_bytes=100.0,
        keeps_some=True,
    )
    reserve.absorb(step)
    assert before == reserve.allowed_growth(100.0)
    assert Reserve(0.0).allowed_growth(100.0) > before


@pytest.mark.parametrize("option", ["--settings", "--without"])
def test_what_is_not_known_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the settings and parts that there are."""
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", option, "luck"])
    assert "'luck' (choose from" in capsys.readouterr().err


def test_the_rows_are_as_the_results_say() -> None:
    """With nothing left out two runs have steps over; what cannot be is refused."""
    rows = read(ROWS, ablate.AblateRow)
    whole = [row for row in rows if row.without == left_out.NOTHING]
    over = {
        (row.model, row.setting)
        for row in whole
        if row.steps_over and not row.is_refused
    }
    assert {"below"} == {row.setting for row in whole if row.is_refused}
    assert {("bert", "resumed"), ("gpt2", "longer loss")} == over
    assert {0} == {row.alloc_retries for row in rows}
    assert {row.without for row in rows} <= set(left_out.PARTS)


def test_sizes_grow_together_until_they_are_shifted() -> None:
    """In the first half of a run each lies at the same share of its range."""
    spec = ModelSpec("t5", {"batch": (4, 4), "source": (0, 100), "target": (0, 50)})
    generator = torch.Generator().manual_seed(1)
    task = {"setting": "shifted", "steps": 40}

    shapes = ablate._shapes(spec, task, generator)

    off = [abs(sizes["source"] - 2 * sizes["target"]) for sizes in shapes]
    assert 40 == len(off)
    assert max(off[:20]) <= 2
    assert max(off[20:]) > 50


def test_parameters_thaw_in_the_second_half() -> None:
    """The first of them; the others are trained all along."""
    loop = ablate._Unfrozen(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    trained = []
    for half in (0, 1):
        loop.set_half(half)
        trained.append([p.requires_grad for p in loop.model.parameters()])
    assert [[False, False, True, True], [True] * 4] == trained
