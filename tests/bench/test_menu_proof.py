"""What the finer exact actions are worth: how it is measured, and judged."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proofs import menu, menu_bytes, menu_picture, menu_times
from benchmarks.proofs.common import Settings
from benchmarks.proofs.menu_times import MenuTimeRow, PlanTimes
from mimose.bench.child import RunFailedError
from mimose.bench.grid.runner import NOTHING, GridRow, GridSettings
from mimose.bench.rows import read, write
from mimose.usage import UsageError

MIB = 2**20
N_WARM_UP, N_STEPS = 1, 3
PLANS = {
    "none": "",
    "oracle": "rr",
    "mimose-menu": "ll",
    "oracle-menu": "kl",
    "static": "rr",
    "static-menu": "ll",
}
SECONDS = {"": 1.0, "rr": 1.4, "ll": 1.2, "kl": 1.1}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings whose files go to a folder of the test's."""
    return Settings(device="sim", threads=1, out=tmp_path)


def _options(**changes: Any) -> argparse.Namespace:
    options = {
        "tasks": ["qa-bert"],
        "budgets": [0.5],
        "steps": N_STEPS,
        "warm_up": N_WARM_UP,
        "rounds": 2,
        "scale": "tiny",
        "resume": False,
        "only": None,
        "time_device": "cpu",
    }
    return argparse.Namespace(**{**options, **changes})


def _row(strategy: str, step: int, share: float = 0.5, **changes: Any) -> GridRow:
    """Plain training grows by 200 MiB in step 2, the others by 98 of 100 at most."""
    is_plain = strategy == "none"
    growth = 200 if is_plain and step == 2 else 98 if step == 2 else 50
    values: dict[str, Any] = {
        **NOTHING,
        "workload": "qa-bert",
        "scale": "tiny",
        "is_synthetic": True,
        "strategy": strategy,
        "budget_share": None if is_plain else share,
        "headroom_bytes": None if is_plain else 100 * MIB,
        "step": step,
        "is_measured": step >= N_WARM_UP,
        "sizes": json.dumps({"length": 10 + step}),
        "phase": "" if is_plain else "plan",
        "plan": PLANS[strategy],
        "base_bytes": MIB,
        "peak_bytes": (1 + growth) * MIB,
        "predicted_growth_bytes": None if is_plain else 98.0 * MIB,
        "loss": 1.0,
        "problem": "",
        "dtype": "float32",
        **GridSettings(
            workloads=(), strategies=(), device="sim", threads=1
        ).provenance(),
    }
    return GridRow(**{**values, **changes})


def _rows(share: float = 0.5) -> list[GridRow]:
    n = N_WARM_UP + N_STEPS
    return [_row(name, step, share) for name in PLANS for step in range(n)]


def _timed(settings: Settings, step: int, plan: str, number: int) -> MenuTimeRow:
    return MenuTimeRow(
        workload="qa-bert",
        scale="tiny",
        step=step,
        sizes=json.dumps({"length": 10 + step}),
        plan=plan,
        round=number,
        # A round in which the machine is busy takes twice as long, whatever runs.
        seconds=SECONDS[plan] * (2 if number == 1 else 1),
        is_exact=True,
        **settings.provenance(),
    )


def _times(settings: Settings) -> PlanTimes:
    times = PlanTimes()
    for step in range(N_WARM_UP, N_WARM_UP + N_STEPS):
        for plan in SECONDS:
            for number in range(3):
                times.add(_timed(settings, step, plan, number))
    return times


def test_a_cell_is_compared_over_planned_steps(settings: Settings) -> None:
    """Extra time of each way, steps over, and the use where a plan was needed."""
    cell = menu._cell("qa-bert", 0.5, _rows(), _times(settings))

    extra = {name: round(value or 0, 6) for name, value in cell.extra.items()}
    assert extra == {
        "oracle": 0.4,
        "mimose-menu": 0.2,
        "oracle-menu": 0.1,
        "static": 0.4,
        "static-menu": 0.2,
    }
    assert set(cell.over.values()) == {0}
    assert (cell.n_compared, cell.n_needed, cell.n_learning) == (3, 1, 0)
    assert cell.use == pytest.approx(0.98)
    assert cell.ratio("oracle-menu") == pytest.approx(1.2 / 1.1)


def test_steps_that_show_an_action_are_told_apart(settings: Settings) -> None:
    """They have no prediction; the time with them is in a column of its own."""
    rows = [
        _row(r.strategy, r.step, plan="rr", predicted_growth_bytes=None)
        if (r.strategy, r.step) == ("mimose-menu", 3)
        else r
        for r in _rows()
    ]
    cell = menu._cell("qa-bert", 0.5, rows, _times(settings))

    assert (cell.n_compared, cell.n_learning) == (2, 1)
    assert cell.extra["mimose-menu"] == pytest.approx(0.2)
    assert cell.with_learning == pytest.approx((0.2 + 0.2 + 0.4) / 3)


def test_the_bars(settings: Settings) -> None:
    """Those of the issue, from one cell: half of the extra time keeps that at 0.5."""
    rows, times = _rows(), _times(settings)
    cells = [menu._cell("qa-bert", 0.5, rows, times)]

    bars = {bar.what: (bar.value, bar.holds) for bar in menu._bars(cells, times)}

    assert list(bars.values()) == [
        (pytest.approx(0.5), True),
        (pytest.approx(1.2 / 1.4), False),
        (pytest.approx(1.2 / 1.1), False),
        (0, True),
        (pytest.approx(0.98), True),
        (0, True),
    ]


def test_what_did_not_run_misses_its_bars(settings: Settings) -> None:
    """A way that failed has no time, and nothing stands in for it."""
    rows = [row for row in _rows() if (row.strategy, row.step) != ("oracle", 3)]
    rows.append(_row("oracle", 3, problem="memory ran out"))
    times = _times(settings)
    cell = menu._cell("qa-bert", 0.5, rows, times)

    assert (cell.over["oracle"], cell.extra["oracle"]) == (None, None)
    assert not menu._bars([cell], times)[0].holds


def test_an_empty_beginning_misses_every_bar(settings: Settings) -> None:
    """Nothing measured is nothing kept."""
    cell = menu._cell("qa-bert", 0.5, [], PlanTimes())

    assert not any(bar.holds for bar in menu._bars([cell], PlanTimes()))


# ------------------------------------------------------------------ bytes


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What of the grid was run, in place of training anything."""
    found: list[tuple[str, float]] = []

    class _Run:
        def __init__(self, grid: GridSettings, task: str) -> None:
            (share,) = grid.budgets
            found.append((task, share))
            self.rows = [row for row in _rows(share) if row.workload == task]

        def run(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(menu_bytes, "WorkloadRun", _Run)
    return found


def test_bytes_are_resumed_by_budget(
    settings: Settings, ran: list[tuple[str, float]]
) -> None:
    """What is complete is kept; plain training's rows are there once."""
    menu_bytes.bytes_of(settings, _options(), runs=True)
    more = _options(budgets=[0.35, 0.5], resume=True)
    rows = menu_bytes.bytes_of(settings, more, runs=True)

    assert ran == [("qa-bert", 0.5), ("qa-bert", 0.35)]
    assert sum(row.strategy == "none" for row in rows) == N_WARM_UP + N_STEPS
    assert len(rows) == 11 * (N_WARM_UP + N_STEPS)
    assert read(settings.out / "menu.csv", GridRow) == rows


def test_bytes_cut_short_are_run_again(
    settings: Settings, ran: list[tuple[str, float]]
) -> None:
    """More steps are other batches; and without --resume all is run again."""
    menu_bytes.bytes_of(settings, _options(), runs=True)
    menu_bytes.bytes_of(settings, _options(resume=True), runs=True)
    assert len(ran) == 1
    menu_bytes.bytes_of(settings, _options(resume=True, steps=9), runs=True)
    assert len(ran) == 2
    menu_bytes.bytes_of(settings, _options(), runs=True)
    assert len(ran) == 3


def test_bytes_of_another_run_are_refused(
    settings: Settings, ran: list[tuple[str, float]]
) -> None:
    """One line says what differs."""
    menu_bytes.bytes_of(settings, _options(), runs=True)

    with pytest.raises(UsageError, match=r"has scale 'tiny', and this run has 'small'"):
        menu_bytes.bytes_of(settings, _options(resume=True, scale="small"), runs=True)


# ------------------------------------------------------------------ times


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> list[dict[str, Any]]:
    """What a child was asked to time; it answers at once."""
    found: list[dict[str, Any]] = []

    def answer(_: str, task: Any, *__: Any, **___: Any) -> Any:
        for order in task["orders"]:
            found.append(order)
            plans = order["plans"]
            place = {k: v for k, v in order.items() if k != "plans"}
            place |= {"workload": task["workload"], "scale": task["scale"]}
            said = {"seconds": 1.0, "is_exact": True}
            yield {"runs": [{**place, **said, "plan": plan} for plan in plans]}

    monkeypatch.setattr(menu_times, "run_child", answer)
    return found


def test_plans_that_are_shared_are_timed_once(
    settings: Settings, asked: list[dict[str, Any]]
) -> None:
    """Each size under each of its plans and bare, in every round."""
    menu_times.times_of(settings, _options(), _rows(), runs=True)

    assert len(asked) == N_STEPS * 2
    assert all(sorted(order["plans"]) == ["", "kl", "ll", "rr"] for order in asked)
    assert [order["round"] for order in asked] == [0] * N_STEPS + [1] * N_STEPS


def test_times_are_resumed_by_round(
    settings: Settings, asked: list[dict[str, Any]]
) -> None:
    """A round lacks no plan, or is run again."""
    menu_times.times_of(settings, _options(), _rows(), runs=True)
    asked.clear()
    rows = [*_rows(), _row("static", 2, plan="kk")]

    times = menu_times.times_of(settings, _options(resume=True), rows, runs=True)

    assert [(order["step"], order["round"]) for order in asked] == [(2, 0), (2, 1)]
    assert times.of(rows[-1]) == (0.0, 1.0)
    asked.clear()
    menu_times.times_of(settings, _options(resume=True, rounds=3), rows, runs=True)
    assert {order["round"] for order in asked} == {2}


def test_times_of_another_device_are_refused(
    settings: Settings, asked: list[dict[str, Any]]
) -> None:
    """Ratios of two devices are not to be mixed."""
    menu_times.times_of(settings, _options(), _rows(), runs=True)

    options = _options(resume=True, time_device="sim")
    with pytest.raises(UsageError, match=r"menu_times.csv has device 'cpu: "):
        menu_times.times_of(settings, options, _rows(), runs=True)


def test_every_plan_is_run_and_compared() -> None:
    """Here in the tests' own process, on a tiny model."""
    pytest.importorskip("transformers")
    order = {"step": 0, "sizes": '{"length": 12}', "round": 0}
    plans = ["", "kkkkkk", "llrrkk", "rrrrrr"]
    task = {
        "workload": "qa-bert",
        "scale": "tiny",
        "seed": 0,
        "device": "cpu",
        "orders": [{**order, "plans": list(plans)}],
    }

    (said,) = menu_times.work(task)

    assert sorted(run["plan"] for run in said["runs"]) == plans
    for run in said["runs"]:
        assert run["is_exact"]
        assert run["seconds"] > 0
        assert {"workload", "scale", "step", "sizes", "round"} <= run.keys()


def test_a_plan_that_is_not_run_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that may not run under an action ends the timing."""
    pytest.importorskip("transformers")
    from mimose.run.actions.lean import Lean

    monkeypatch.setattr(Lean, "refuses", lambda *_: "it is not to be")
    order = {"step": 0, "sizes": '{"length": 12}', "round": 0, "plans": ["llllll"]}
    task = {"workload": "qa-bert", "scale": "tiny", "seed": 0, "device": "cpu"}
    task["orders"] = [order]

    with pytest.raises(RunFailedError, match="the plan 'llllll' was run otherwise"):
        next(iter(menu_times.work(task)))


def test_the_picture(settings: Settings, tmp_path: Path) -> None:
    """It is drawn from the rows alone, and has what the proof says."""
    pytest.importorskip("matplotlib")
    steps = range(N_WARM_UP, N_WARM_UP + N_STEPS)
    timed = [_timed(settings, step, plan, 0) for step in steps for plan in SECONDS]
    rows, times, picture = (tmp_path / name for name in ("a.csv", "b.csv", "c.png"))
    write(rows, GridRow, _rows())
    write(times, MenuTimeRow, timed)

    extra = menu.extra_times(_rows(), timed)[0.5]
    status = menu_picture.main([str(rows), str(times), str(picture)])

    assert pytest.approx(0.2) == extra["mimose-menu"]
    assert pytest.approx(0.4) == extra["static"]
    assert (0, b"\x89PNG") == (status, picture.read_bytes()[:4])
    write(times, MenuTimeRow, [])
    with pytest.raises(ValueError, match="nothing to draw"):
        menu_picture.draw(rows, times, picture)
