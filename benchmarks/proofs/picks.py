"""Which action suits which layer, at which budget and shape?

Sessions with all actions learn what each needs and takes on the simulated accelerator,
under plans made at random. Then, for batches of several sizes and budgets between
everything recomputed and everything kept, the learned problem is planned three times:
with the exact actions that stay on the device (``fine``), with those of the host
besides (``exact``), and with the lossy ones as well (``all``). Rows have each plan,
which segment binds, and what each action costs a byte. At some budgets the plans of the
smallest and the largest menu are then run on the same batches, beside a bare model.

    python -m benchmarks.proofs picks --threads 1
    python -m benchmarks.proofs picks --threads 1 --workloads ic-digits --scale tiny
    python -m benchmarks.proofs.picks_picture picks.csv PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.proofs.common import (
    Answer,
    Bar,
    Settings,
    count,
    device,
    progress,
    rows_of,
)
from benchmarks.proofs.numbers import percent, worst
from benchmarks.proofs.picks_menus import MENUS
from mimose.bench.grid.strategies import ALL, ALL_MENU
from mimose.bench.grid.workloads import SCALES
from mimose.bench.rows import Row

QUESTION = "Which action suits which layer, at which budget and shape?"
SHAPES: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "qa-bert": tuple({"length": n} for n in (96, 160, 224, 320, 448)),
    "lm-gpt2": tuple({"length": n} for n in (64, 128, 192, 288, 384)),
    "ic-digits-50": tuple(
        {"images": 16, "side": side} for side in (64, 88, 112, 136, 160)
    ),
    "ic-digits": tuple({"side": side} for side in (64, 88, 112, 136, 160)),
}
"""By workload: the batches that are planned, the smallest first."""
SHARES = (0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
RUN_SHARES = (0.1, 0.3, 0.6)
OPTIONS = (
    device("sim"),
    (
        "--workloads",
        {
            "nargs": "+",
            "choices": tuple(SHAPES),
            "default": ["qa-bert", "ic-digits-50"],
        },
    ),
    ("--scale", {"choices": SCALES, "default": "small"}),
    count("--learn", 40, "passes over the shapes to try actions in, at the most"),
    count("--timed", 4, "passes under random plans, to time them"),
    count("--rounds", 3, "over the shapes, where plans are run"),
)
PLANNED, RAN = "planned", "ran"
BARE = "bare"
"""The model without a session, among what runs."""
_COST_BAR, _RUN_BAR = 1.01, 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class PickRow(Row):
    """One plan; or one step of training under it."""

    workload: str
    scale: str
    part: str
    """``planned`` or ``ran``."""
    menu: str
    """``fine``, ``exact`` or ``all``; ``bare`` for no session."""
    sizes: str
    """The batch's, as JSON."""
    budget_share: float
    """Of the way from recomputing everything to keeping everything, at these sizes."""
    round: int
    """Of the runs; -1 for one that does not count, since layers meet an action first,
    and for what is planned alone."""
    plan: str
    """A letter for each layer's call, as the menu of all actions has it."""
    budget_bytes: float | None
    """For the step's growth."""
    growth_bytes: int | None
    """Measured; None for what is planned alone, and the bare model."""
    predicted_growth_bytes: float | None
    predicted_seconds: float | None
    """That the plan adds to the step."""
    step_seconds: float | None
    """Of the process, for forward and backward."""
    is_proved: bool
    """Whether no plan of the menu is cheaper."""
    binds: str
    """The first segment that reaches the plan's peak."""
    prices: str
    """By action, the median over the layers of seconds for a GiB less held than what
    is kept, as JSON."""

    @property
    def shares(self) -> dict[str, float]:
        """By action, what share of the layers' calls has it."""
        names = {spec.code: spec.name for spec in ALL_MENU.specs}
        counts = Counter(names[code] for code in self.plan)
        return {name: n / counts.total() for name, n in counts.items()}


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Learn, plan and run, for every workload."""
    answer = Answer()
    for workload in options.workloads:
        rows = rows_of(
            PickRow,
            "picks_runs",
            settings,
            workload=workload,
            scale=options.scale,
            shapes=SHAPES[workload],
            shares=SHARES,
            run_shares=RUN_SHARES,
            learn=options.learn,
            timed=options.timed,
            rounds=options.rounds,
        )
        answer.rows += rows
        for menu in MENUS:
            answer.table += [_line(workload, menu, share, rows) for share in SHARES]
        answer.bars += _bars(workload, rows)
        answer.notes += [_ran(workload, share, rows) for share in RUN_SHARES]
        progress(f"picks: {workload}: done")
    return answer


def _line(
    workload: str, menu: str, share: float, rows: Iterable[PickRow]
) -> Mapping[str, object]:
    own = [
        row
        for row in rows
        if (row.part, row.menu, row.budget_share) == (PLANNED, menu, share)
    ]
    shares = [row.shares for row in own]
    picked = {
        name: percent(sum(each.get(name, 0.0) for each in shares) / len(own), 0)
        for name in ALL
    }
    return {
        "workload": workload,
        "menu": menu,
        "budget": share,
        **{name: "" if part == "0%" else part for name, part in picked.items()},
        "extra ms": 1e3 * sum(row.predicted_seconds or 0.0 for row in own),
        "binds": Counter(_kind(row.binds) for row in own).most_common(1)[0][0],
    }


def _kind(segment: str) -> str:
    """Return what a segment is, whichever layer's."""
    return segment.split()[0]


def _bars(workload: str, rows: Sequence[PickRow]) -> list[Bar]:
    cost = {
        (row.menu, row.sizes, row.budget_share): row.predicted_seconds or 0.0
        for row in rows
        if row.part == PLANNED
    }
    ratios = {
        menu: worst(
            seconds / cost["fine", sizes, share]
            for (own, sizes, share), seconds in cost.items()
            if own == menu and cost["fine", sizes, share] > 0
        )
        for menu in ("exact", "all")
    }
    planned = [
        Bar(f"{workload}: seconds of a plan of {menu} ÷ of fine, most", most, _COST_BAR)
        for menu, most in ratios.items()
    ]
    ran = [
        Bar(
            f"{workload} at {share:g}: measured extra seconds of all ÷ of fine",
            _ratio(share, rows),
            _RUN_BAR,
        )
        for share in RUN_SHARES
    ]
    return [*planned, *ran]


def _ratio(share: float, rows: Iterable[PickRow]) -> float | None:
    found = extra_by_menu(share, rows)
    return found["all"] / found["fine"] if found.get("fine") else None


def extra_by_menu(share: float, rows: Iterable[PickRow]) -> dict[str, float]:
    """Return the seconds that runs at a budget took beyond the bare model's, by menu.

    Of each plan of a batch the quickest run counts, whoever ran it: other work on the
    machine slows, and never speeds.
    """
    quickest: dict[tuple[str, str], float] = {}
    plans: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.budget_share == share and row.round >= 0 and row.step_seconds:
            key = row.sizes, row.plan
            quickest[key] = min(quickest.get(key, row.step_seconds), row.step_seconds)
            plans.setdefault(row.menu, {})[row.sizes] = row.plan
    total = {
        menu: sum(quickest[each] for each in own.items()) for menu, own in plans.items()
    }
    return {menu: total[menu] - total[BARE] for menu in total if menu != BARE}


def _ran(workload: str, share: float, rows: Iterable[PickRow]) -> str:
    found = extra_by_menu(share, rows)
    told = ", ".join(f"{menu} {1e3 * extra:.0f}" for menu, extra in found.items())
    return f"{workload} at {share:g}: ms beyond the bare model's, {told}"


def read_prices(row: PickRow) -> Mapping[str, float]:
    """Return a plan's prices."""
    prices: Mapping[str, float] = json.loads(row.prices)
    return prices
