"""The proofs of accelerators judge what was measured, and run on the simulated one.

Here they train in this process, for a child takes longer to start than to train.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import (
    exact,
    falls,
    hostcost,
    prediction,
    sequences,
    soak,
    soak_run,
    tight,
)
from benchmarks.proofs.common import Answer, Bar, Settings
from benchmarks.proofs.models import ModelSpec
from mimose.bench import device

MIB = 2**20


@pytest.fixture
def run(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Ask a question in small, on the device in this very process."""

    def ask(proof: ModuleType, *models: str, **options: Any) -> Answer:
        monkeypatch.setattr(
            "benchmarks.proofs.common.run_child", lambda _, task, __: proof.work(task)
        )
        settings = Settings(device="sim", models=models)
        return proof.ask(settings, argparse.Namespace(**options))

    return ask


def _missed(bars: list[Bar]) -> list[str]:
    return [bar.what for bar in bars if not bar.holds]


def _row(kind: Any, fields: dict[str, Any], changes: dict[str, Any]) -> Any:
    settings = Settings(device="sim")
    return kind(**{**fields, **changes}, **settings.provenance())


def _fall_row(step: int, **changes: Any) -> falls.FallRow:
    fall = 3 * step // 9
    fields = {
        "model": "bert",
        "falls": True,
        "step": step,
        "sizes": "{}",
        "fall": fall,
        "limit_bytes": [None, 90, 80][fall],
        "needed_before_bytes": [0, 100, 85][fall],
        "phase": "plan",
        "actions": 6,
        "kept": 3,
        "reserved_peak_bytes": 79,
        "requested_peak_bytes": 70,
        "out_of_memory": int(step in (3, 6)),
        "retries": int(step in (3, 6)),
        "reason": "",
        "loss": 1.0 / (step + 1),
        "seconds": 0.1,
    }
    return _row(falls.FallRow, fields, changes)


def _host_row(**changes: Any) -> hostcost.HostRow:
    fields = {
        "model": "bert",
        "step": 9,
        "phase": "plan",
        "cache_hit": True,
        "actions": 6,
        "recomputed": 3,
        "draws": True,
        "waits": 1,
        "bare_waits": 1,
        "state_copies": 3,
        "bare_state_copies": 0,
        "meter_calls": 5,
        "meter_seconds": 30e-6,
        "reason": "",
    }
    return _row(hostcost.HostRow, fields, changes)


def _exact_row(**changes: Any) -> exact.ExactRow:
    kinds = ("gradient", "weight", "optimizer state", "buffer", "random state")
    fields = {
        "model": "bert",
        "step": 19,
        "sizes": "{}",
        "phase": "plan",
        "budget_bytes": 100,
        "reserved_peak_bytes": 90,
        "actions": 6,
        "recomputed": 3,
        "retries": 0,
        "reason": "",
        "loss": 1.0,
        "is_equal": True,
        "compared": json.dumps(dict.fromkeys(kinds, 2)),
        "different": "[]",
    }
    return _row(exact.ExactRow, fields, changes)


# ------------------------------------------------------------------ the device


@pytest.mark.parametrize(
    ("name", "is_expandable", "expected"),
    [("sim", True, 0), ("cuda", False, 0), ("cuda:1", True, 2)],
)
def test_environment(name: str, is_expandable: bool, expected: int) -> None:
    """Variables are for allocators that read them when torch is imported."""
    task = {"device": name, "is_expandable": is_expandable}
    assert expected == len(device.environment_of(task))


def test_a_cpu_has_no_segments() -> None:
    """Asking for expandable ones says what to change."""
    with pytest.raises(ValueError, match="leave --expandable out"):
        device.prepare({"device": "cpu", "is_expandable": True})


@pytest.mark.parametrize(
    ("name", "batch", "layers"), [("cpu", (8, 8), None), ("sim", (8, 8), 6)]
)
def test_soak_setup(name: str, batch: tuple[int, int], layers: int | None) -> None:
    """On an accelerator T5 has more layers; nothing else differs."""
    spec = soak_run.spec_on("t5", name)
    assert (batch, layers) == (spec.sizes["batch"], spec.changes.get("num_layers"))


@pytest.mark.parametrize(
    ("plain", "least", "expected"), [(200, 100, (200, 180)), (100, 100, (114, 102))]
)
def test_soak_headroom(plain: int, least: int, expected: tuple[int, int]) -> None:
    """On an accelerator the budget leaves 15% over the least at any rate."""
    probe = [
        {
            "growth_bytes": plain,
            "level_growth_bytes": 9 * plain // 10,
            "is_rank": True,
            "is_full": False,
        },
        {"growth_bytes": least, "is_rank": False, "is_full": True},
        {"drift_bytes": 0},
    ]
    found = soak._headroom(probe, "sim")
    assert expected == (found["headroom_bytes"], found["level_headroom_bytes"])


@pytest.mark.parametrize(
    ("name", "batch", "growth"), [("cpu", (18, 30), 100), ("sim", (6, 10), 16)]
)
def test_prediction_setup(name: str, batch: tuple[int, int], growth: int) -> None:
    """On an accelerator batches are a third, and smaller growths count."""
    assert batch == prediction._spec_on("bert", name).sizes["batch"]
    assert growth * MIB == prediction._least_growth(name)


# ------------------------------------------------------------------ judging


def test_falls_bars() -> None:
    """Each fall may cost one out-of-memory, and has to."""
    fallen = [_fall_row(step) for step in range(9)]
    even = [_fall_row(step, falls=False, fall=0, out_of_memory=0) for step in range(9)]
    again = [*fallen[:8], _fall_row(8, out_of_memory=1, retries=1, loss=2.0)]
    calm = [*fallen[:6], _fall_row(6, out_of_memory=0, retries=0), *fallen[7:]]

    assert [] == _missed(falls._judge(even, fallen, 9))
    assert 3 == len(_missed(falls._judge(even, again, 9)))
    assert ["falls that bind"] == _missed(falls._judge(even, calm, 9))


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, 0),
        ({"waits": 2}, 1),
        ({"state_copies": 4}, 1),
        ({"draws": False}, 1),
        ({"meter_seconds": 41e-6}, 1),
        ({"recomputed": 6}, 1),
    ],
)
def test_hostcost_bars(changes: dict[str, Any], missed: int) -> None:
    """A wait, a copy, a microsecond too many: each misses its bar."""
    measured = _host_row(phase="collect", cache_hit=False, waits=2, state_copies=7)
    bars = hostcost._judge([measured, _host_row(**changes)], 1)
    assert missed == len(_missed(bars))


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, 0),
        ({"is_equal": False}, 1),
        ({"different": '["weight w"]'}, 1),
        ({"recomputed": 0}, 1),
        ({"compared": ""}, 1),
    ],
)
def test_exact_bars(changes: dict[str, Any], missed: int) -> None:
    """What differs, and what was not compared or not planned, misses a bar."""
    assert missed == len(_missed(exact._judge([_exact_row(**changes)], 1)))


# ------------------------------------------------------------------ on the device

_GPT2 = ModelSpec(model="gpt2", sizes={"batch": (2, 2), "length": (32, 192)})


@pytest.mark.sim
def test_hostcost_runs(run: Any) -> None:
    """No planned step waits more than the bare model; CPU time is not judged here."""
    answer = run(hostcost, "gpt2", steps=6)
    assert {"gpt2: the meter's CPU time in µs"} >= set(_missed(answer.bars))


@pytest.mark.sim
def test_exact_runs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a small model leaves is equal to the last bit."""
    monkeypatch.setattr(exact, "_SPECS", {"gpt2": _GPT2})
    answer = run(exact, steps=12)
    assert 12 == len(answer.rows)
    assert {"gpt2: plans that keep some and recompute some"} >= set(
        _missed(answer.bars)
    )


@pytest.mark.sim
def test_tight_refuses_by_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of two thirds of the least is refused, and the error says who holds."""
    spec = ModelSpec(model="gpt2", sizes={"batch": (4, 4), "length": (256, 256)})
    monkeypatch.setattr(tight, "_SPECS", {"gpt2": spec})
    monkeypatch.setattr(tight, "_SHARE", 0.34)

    answer = run(tight, steps=4)

    assert [] == _missed(answer.bars)
    refused = next(row for row in answer.rows if row.phase == "refused")
    assert "the step itself" in refused.holders


@pytest.mark.sim
def test_sequences_trains_bare_and_within_the_budget(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of dropped layers are equal to the bare ones, and judged by their phase."""
    monkeypatch.setattr("benchmarks.proofs.varying._LENGTHS", (32, 64, 8))
    answer = run(sequences, cases=["layerdrop"], steps=10, share=0.9)
    (line,) = answer.table
    assert "layerdrop" == line["case"]
    assert ["layerdrop: steps whose loss or gradients differ"] == [
        bar.what for bar in answer.bars if "differ" in bar.what and bar.holds
    ]
    assert 10 == len(answer.rows)
