"""The comparison with MONeT: what is read from its table, timed, and judged."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import monet, monet_runs
from benchmarks.proofs.common import Settings
from benchmarks.proofs.monet_cases import CASES
from benchmarks.proofs.monet_page import page
from benchmarks.proofs.monet_published import CURVES, published
from mimose.bench.rows import read
from mimose.planners import Optimal, PlanningProblem

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_published_model_is_trained():
    """And a transformer, of which there are no rows."""
    assert {*CURVES, "bert"} == set(monet.MODELS) == set(CASES)


@pytest.mark.parametrize(
    ("share", "overhead"),
    [
        (1.0, 0.0),
        (10.01 / 15.06, 0.0322),
        ((10.01 + 9.01) / 2 / 15.06, (0.0322 + 0.0468) / 2),
        (4.99 / 15.06, 0.1195),
    ],
)
def test_published_overheads_are_linear_between_rows(share, overhead):
    """And nothing where all is kept."""
    found = published("resnet50", share)
    assert found is not None
    assert (pytest.approx(overhead), share) == found


def test_below_its_least_row_that_row_is_returned():
    """With its own share, so that nobody takes it for less memory."""
    assert (0.0911, 5.51 / 14.12) == published("vgg16", 1 / 3)
    assert published("bert", 1 / 3) is None


def test_plans_are_compared_round_by_round():
    """With the bare model of the same round; the medians of ratios."""
    plain = [{"plan": "", "round": i, "seconds": 1.0 + i} for i in range(3)]
    mine = [
        {"plan": "kr", "round": i, "seconds": ratio * (1.0 + i), "is_exact": i != 1}
        for i, ratio in enumerate((1.1, 1.5, 1.2))
    ]
    found = monet._times([*plain, *mine], "kr")
    assert pytest.approx(0.2) == found["overhead"]
    assert (2.0, 3, False) == (
        found["plain_seconds"],
        found["rounds"],
        found["is_exact"],
    )


def _row(**changes):
    fields = {
        "model": "resnet50",
        "batch": 8,
        "length": 128,
        "calls": 2,
        "parameter_bytes": 1,
        "plain_growth_bytes": 300,
        "plain_flops": 100,
        "target": "0.333",
        "planner": "optimal",
        "is_reached": True,
        "is_proved": True,
        "binding": "backward of b",
        "plan": "rk",
        "predicted_growth_bytes": 100.0,
        "growth_bytes": 100,
        "planner_seconds": 0.001,
        "predicted_seconds": 0.1,
        "recomputed_flops": 10,
        "plain_seconds": 1.0,
        "overhead": 0.1,
        "rounds": 7,
        "is_exact": True,
        **changes,
    }
    return monet.MonetRow(**fields, **Settings().provenance())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # All but VGG-16, whose least row costs 9.11%.
        ([{"model": model} for model in ("resnet50", "unet", "bert", "vgg16")], 3),
        ([{"overhead": 0.12}], 0),
        ([{"is_reached": False}], 0),
        ([{"planner": "marginal"}], 0),
        ([{"target": "0.5"}], 0),
    ],
)
def test_a_model_counts_where_a_third_costs_no_more(changes, expected):
    """Reached, by the optimum, at no more than published at that share or above."""
    rows = [_row(**{"overhead": 0.11, **each}) for each in changes]
    counted = next(b for b in monet._judge(rows) if "a third costs" in b.what)
    assert expected == counted.value


def _problem():
    """Four calls: all kept they hold 400, recomputed 40; each takes a second."""
    return PlanningProblem(
        events=("a#0", "b#0", "c#0", "d#0"),
        actions=("keep", "recompute"),
        allowed=np.ones((4, 2), dtype=bool),
        held_bytes=np.array([[100.0, 10.0]] * 4),
        forward_excess_bytes=np.array([[100.0, 10.0]] * 4),
        backward_excess_bytes=np.zeros((4, 2)),
        backward_net_bytes=np.zeros(4),
        cost=np.array([[0.0, 1.0]] * 4),
        gap_bytes=np.zeros(5),
        gap_excess_bytes=np.zeros(5),
        start_bytes=1000.0,
        optimizer_state_bytes=0.0,
        step_excess_bytes=0.0,
        budget_bytes=np.inf,
        host_bytes=np.zeros((4, 2)),
        host_budget_bytes=np.inf,
    )


def test_a_plan_that_grew_beyond_its_share_is_made_again():
    """For as much less, until the step itself keeps the share."""
    asked = []

    def measured(plan):
        asked.append(plan["share"])
        return {**plan, "growth_bytes": plan["predicted_growth_bytes"] + 50}

    found = monet_runs._within(_problem(), Optimal(), 400, 0.6, measured)
    assert 2 == len(asked)
    assert found["is_reached"]
    assert 240 >= found["growth_bytes"]
    assert 3.0 == found["predicted_seconds"]


def test_what_no_plan_reaches_is_the_least_there_is():
    """And is said to be."""
    found = monet_runs._within(
        _problem(), Optimal(), 400, 0.05, lambda plan: {**plan, "growth_bytes": 40}
    )
    assert not found["is_reached"]
    assert 40.0 == found["predicted_growth_bytes"]


def test_the_memory_of_so_much_time():
    """Two seconds recompute two of four calls."""
    share = monet_runs._cheap_share(_problem(), 400, 2.0)
    assert 220 / 400 <= share <= 230 / 400


def test_what_cannot_be_reached_says_what_binds():
    """And the least there is."""
    row = dataclasses.replace(_row(), is_reached=False, growth_bytes=150)
    [note] = monet._notes([row, _row(planner="", growth_bytes=120)])
    assert "50.0%" in note
    assert "least of any plan was 40.0%" in note
    assert "backward of b" in note


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_the_table_of_the_documentation_comes_from_the_rows():
    """Every number of it; and every plan was exact."""
    rows = read(DOCS / "results" / "cpu" / "monet.csv", monet.MonetRow)
    assert page(rows) in (DOCS / "bench.md").read_text(encoding="utf-8")
    assert all(row.is_exact for row in rows)
    assert set(monet.MODELS) == {row.model for row in rows}


def test_a_line_of_the_table_has_both_planners():
    """And says where MONeT's rows end."""
    rows = [_row(), _row(planner="marginal", overhead=0.2), _row(model="vgg16")]
    _, _, first, second = page(rows).splitlines()
    assert "| +10.0% | +20.0% | 10.0% | +11.9% | 1.0 / 1.0 |" in first
    assert "+9.1%, its least, at 39.0%" in second
