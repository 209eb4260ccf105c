"""The map of what plans pick: menus of one problem, what is compared, the picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks.menus import draw_whole_menu
from benchmarks.proofs import picks, picks_picture, picks_runs
from benchmarks.proofs.common import Settings
from benchmarks.proofs.picks import BARE, PLANNED, RAN, PickRow
from benchmarks.proofs.picks_menus import Anything, budget_at, restricted
from mimose.bench.rows import write
from mimose.planners import PlanningProblem, peak_bytes

WHOLE = "keep", "recompute"


@pytest.fixture
def problem() -> PlanningProblem:
    """A step of eight layers that may run under any of twelve actions."""
    return draw_whole_menu(np.random.default_rng(1), "layers", 8, pairs=True)


def test_a_part_of_a_menu_is_a_problem_of_its_own(problem: PlanningProblem) -> None:
    """Every table has the columns of the actions that are left, in their order."""
    names = "recompute", "pool", "keep", "none of these"
    part = restricted(problem, names)
    assert part.actions == ("keep", "pool", "recompute")
    assert part.lossy == {"pool"}
    columns = [problem.actions.index(name) for name in part.actions]
    for name in ("allowed", "held_bytes", "cost", "releases_input", "host_bytes"):
        expected = getattr(problem, name)[:, columns]
        assert (getattr(part, name) == expected).all(), name
    assert (part.gap_bytes == problem.gap_bytes).all()


def test_a_budget_lies_between_the_ends_of_whole_layers(
    problem: PlanningProblem,
) -> None:
    """Whatever else the menu has, so that menus are compared at the same bytes."""
    whole = restricted(problem, WHOLE)
    ends = [float(peak_bytes(whole, np.full(8, i))) for i in (1, 0)]
    assert [budget_at(each, 0.0) for each in (problem, whole)] == [ends[0]] * 2
    assert budget_at(problem, 1.0) == ends[1]
    assert budget_at(problem, 0.25) == pytest.approx(0.75 * ends[0] + 0.25 * ends[1])


def test_everything_is_kept_until_plans_are_random(problem: PlanningProblem) -> None:
    """What is kept gives way to actions that are tried."""
    planner = Anything(0)
    assert set(planner.plan(problem).actions) == {"keep"}
    planner.is_random = True
    plans = [planner.plan(problem).actions for _ in range(40)]
    assert {name for plan in plans for name in plan} == set(problem.actions)


def _row(**changes: Any) -> PickRow:
    fields: dict[str, Any] = {
        "workload": "ic-digits",
        "scale": "tiny",
        "part": RAN,
        "menu": "all",
        "sizes": '{"side": 32}',
        "budget_share": 0.2,
        "round": 0,
        "plan": "kp",
        "budget_bytes": None,
        "growth_bytes": 1,
        "predicted_growth_bytes": 1.0,
        "predicted_seconds": 0.1,
        "step_seconds": 2.0,
        "is_proved": True,
        "binds": "",
        "prices": "",
    }
    return PickRow(**{**fields, **changes}, **Settings(device="sim").provenance())


def test_of_each_plan_the_quickest_run_counts_whoever_ran_it() -> None:
    """The same plan takes the same time; what a layer takes at first does not count."""
    bare = {"menu": BARE, "plan": "", "predicted_growth_bytes": None}
    rows = [
        _row(**bare, step_seconds=1.2),
        _row(**bare, step_seconds=1.0),
        _row(step_seconds=1.5),
        _row(step_seconds=1.4, menu="fine"),
        _row(step_seconds=1.1, round=-1),
        _row(step_seconds=0.1, budget_share=0.45),
        _row(step_seconds=None, part=PLANNED, round=-1),
    ]
    found = picks.extra_by_menu(0.2, rows)
    assert found == {"all": pytest.approx(0.4), "fine": pytest.approx(0.4)}
    others = [row for row in rows if row.menu != "fine"]
    other = _row(step_seconds=1.6, menu="fine", plan="kr")
    found = picks.extra_by_menu(0.2, [*others, other])
    assert found == {"all": pytest.approx(0.5), "fine": pytest.approx(0.6)}


def _rows(*, all_costs: float) -> list[PickRow]:
    """Two shapes at every budget; ``all`` takes its part of the time of ``fine``."""
    planned = {"part": PLANNED, "round": -1, "step_seconds": None}
    bare = {"menu": BARE, "plan": "", "predicted_growth_bytes": None}
    rows = []
    for side in (32, 64):
        sizes = json.dumps({"side": side})
        for share in picks.SHARES:
            for menu, plan, cost in (
                ("fine", "kr", 1.0),
                ("exact", "ko", 0.9),
                ("all", "kp", all_costs),
            ):
                own = {"menu": menu, "plan": plan, "sizes": sizes}
                told = {"budget_share": share, "predicted_seconds": cost}
                binds = {"binds": "backward of layer.1#0", "prices": '{"pool": 2.0}'}
                rows.append(_row(**planned, **own, **told, **binds))
                if share in picks.RUN_SHARES and menu != "exact":
                    rows.append(_row(**own, budget_share=share, step_seconds=1 + cost))
            if share in picks.RUN_SHARES:
                at = {"sizes": sizes, "budget_share": share}
                rows.append(_row(**bare, **at, step_seconds=1.0))
    return rows


@pytest.mark.parametrize(("all_costs", "holds"), [(0.5, True), (1.1, False)])
def test_a_larger_menu_may_not_cost_more(
    monkeypatch: pytest.MonkeyPatch, all_costs: float, holds: bool
) -> None:
    """As planned at any budget and shape, and as measured where plans are run."""
    rows = _rows(all_costs=all_costs)
    monkeypatch.setattr(picks, "rows_of", lambda *_, **__: rows)
    options = argparse.Namespace(
        workloads=["ic-digits"], scale="tiny", learn=1, timed=1, rounds=1
    )
    answer = picks.ask(Settings(device="sim"), options)
    judged = {bar.what: bar.holds for bar in answer.bars}
    n_runs = len(picks.RUN_SHARES)
    assert list(judged.values()) == [True, holds, *([holds] * n_runs)]
    lines = {(line["menu"], line["budget"]): line for line in answer.table}
    line = lines["all", picks.SHARES[0]]
    assert (line["keep"], line["pool"], line["recompute"]) == ("50%", "50%", "")
    assert line["binds"] == "backward"
    assert line["extra ms"] == pytest.approx(2e3 * all_costs)
    assert _rows(all_costs=1)[0].shares == {"keep": 0.5, "recompute": 0.5}


def test_the_map_is_drawn_from_the_rows(tmp_path: Path) -> None:
    """A panel for each workload and menu; without plans it says what to do."""
    pytest.importorskip("matplotlib")
    rows = _rows(all_costs=0.5)
    rows += [replace(row, workload="qa-bert") for row in rows]
    write(tmp_path / "picks.csv", PickRow, rows)
    picture = tmp_path / "picks.png"
    assert picks_picture.main([str(tmp_path / "picks.csv"), str(picture)]) == 0
    assert picture.stat().st_size > 20_000
    write(tmp_path / "none.csv", PickRow, [row for row in rows if row.part == RAN])
    with pytest.raises(ValueError, match="run the proof picks first"):
        picks_picture.draw(tmp_path / "none.csv", picture)


@pytest.mark.usefixtures("sim")
def test_a_small_run_tells_every_cell() -> None:
    """Three menus at every shape and budget; then each arm at every shape."""
    task = {
        "workload": "ic-digits",
        "scale": "tiny",
        "shapes": [{"side": side} for side in (16, 24)],
        "shares": [0.3],
        "run_shares": [0.5],
        "learn": 1,
        "timed": 1,
        "rounds": 1,
        "seed": 0,
        "device": "sim",
    }
    rows = [_row(**told) for told in picks_runs.work(task)]
    planned = [(row.sizes, row.menu) for row in rows if row.part == PLANNED]
    assert len(set(planned)) == len(planned) == 2 * 3
    ran = [row.menu for row in rows if row.part == RAN]
    assert sorted(ran) == sorted(2 * 2 * [BARE, "fine", "all"])
    assert all(len(row.plan) == 9 for row in rows if row.menu != BARE)
    assert all(row.binds for row in rows if row.part == PLANNED)
