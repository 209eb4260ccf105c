"""Text of any width, and the session's report in it."""

from __future__ import annotations

import pytest

from mimose.records import FirstTimes, RankWaits, StepRecord, Summary, kind_of
from mimose.report.text import report

MIB = 2**20


def _records(n_steps, n_shapes, **changes):
    """Make planned steps of a model with long names."""
    return [
        StepRecord(
            **{
                "step": i,
                "shape": {
                    "attention_mask.1": 20 + i % n_shapes,
                    "labels.1": i % n_shapes,
                },
                "phase": "plan",
                "actions": ("recompute", *["keep"] * 23),
                "budget_bytes": 3 * 2**30,
                "start_bytes": 300 * MIB,
                "predicted_peak_bytes": 505.5 * MIB,
                "observed_peak_bytes": (305 + i % n_shapes) * MIB,
                "reason": f"forward of encoder.layer.0#0: {i} is beyond 40, the most",
                **changes,
            }
        )
        for i in range(n_steps)
    ]


def _report(records, width):
    numbers = dict.fromkeys(Summary.__dataclass_fields__, 1) | {
        "first_times": FirstTimes(40, 64, 0.4, 0.1),
        "rank_waits": RankWaits(40, 9.0, 1.5, (10, 30)),
        "phases": {"collect": 9, "plan": 98_000},
        "kept_units": {"encoder.layer.3": "it returned something else when run again"},
        "inexact_layers": {"bert.encoder.layer.4": "its kernels are not deterministic"},
        "largest_to_come": {"labels.1": 900},
        "budget_range": (1, 1),
        "unplanned": ("8 forwards in evaluation mode: call model.train()",),
        "host": None,
        "agreement": None,
        "byte_price": (8.6, "single", "of NVIDIA A100-SXM4-80GB"),
        "rehearsed": "learned in a rehearsal of an H100",
    }
    return report(Summary(**numbers), records, width)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("n_steps", "n_shapes"), [(1, 1), (5000, 700)])
def test_a_report_fits_its_width(n_steps, n_shapes, width):
    """No line is longer, and the largest peaks are there."""
    text = _report(_records(n_steps, n_shapes), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) < 80
    told = " ".join(text.split())
    assert f"{304 + n_shapes}.0 MiB" in told
    assert "1/24" in told
    assert "it returned something else when run again" in told
    assert "From 9.5 times that batch" in told  # 9.5 / 10.5 s, 19 / 20 s


def test_a_report_counts_like_remarks_together():
    """Remarks that differ in numbers alone are one line, with the last of them."""
    reasons = ["selective tried", "7 is beyond 5", "8 is beyond 5"]
    text = _report([r for why in reasons for r in _records(1, 1, reason=why)], 120)
    _, listed = text.split("Unusual steps\n")
    assert ["2 × 8 is beyond 5", "1 × selective tried"] == [
        line.strip() for line in listed.splitlines()[:2]
    ]
    assert "# is beyond #" == kind_of("1,180 is beyond 4.5")
