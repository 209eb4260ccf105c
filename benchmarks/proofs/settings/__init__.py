"""What do people get who train in other ways than one loss of one forward?

Small models train as people do: pairs, adversaries, preferences, experts, adapters,
own loops. Each trains twice from the same weights and random state: bare, and within a
budget between what keeping everything and recomputing everything reserve. A row says
what came of it: planned, recomputed without a plan, refused or an error; what mimose
said; whether losses, gradients and weights are equal to the last bit; and whether the
budget was kept.

    python -m benchmarks.proofs settings
    python -m benchmarks.proofs settings --cases gan two-towers --steps 12
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.proofs.common import (
    Answer,
    Bar,
    Settings,
    count,
    device,
    progress,
    said_by,
)
from benchmarks.proofs.numbers import mebibytes, quantile
from benchmarks.proofs.settings.apart import DiedError, apart
from benchmarks.proofs.settings.case import SETTINGS, Outcome
from benchmarks.proofs.settings.trial import Trial
from mimose.bench.device import SIM, kind_of
from mimose.bench.rows import Row

__all__ = ["OPTIONS", "QUESTION", "ask", "work"]

for _name in (
    *("domains", "families", "layers", "loops", "operations", "pairs", "teachers"),
    "weights",
):
    importlib.import_module(f"{__name__}.{_name}")  # fills `SETTINGS`

QUESTION = "What do people get who train in other ways than one loss of one forward?"
OPTIONS = (
    device("sim"),
    count("--steps", 24, "a setting"),
    ("--cases", {"nargs": "+", "choices": sorted(SETTINGS), "default": []}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow(Row):
    """One setting."""

    setting: str
    what: str
    outcome: Outcome
    expected: Outcome
    says: str
    """A part of what was expected to be said."""
    message: str
    """The error, else what mimose logged, a line each."""
    reasons: str
    """As JSON: how many steps gave which reason."""
    steps: int
    records: int
    """Forwards that were steps to the sessions."""
    phases: str
    """As JSON."""
    first_plan: int | None
    """The number of the first step in phase `plan`."""
    planned: int
    mixed: int
    """Planned steps that kept some and recomputed some."""
    recomputed: int
    """Layer calls, of all steps."""
    calls: int
    retries: int
    units: int
    least_bytes: int | None
    """The most that the longest batch's step reserves with everything recomputed."""
    most_bytes: int | None
    """And with everything kept."""
    budget_bytes: int | None
    peak_bytes: int | None
    left_bytes: int | None
    """Still allocated when all is over, beyond what the bare run leaves."""
    over: int
    is_equal: bool | None
    """Whether losses, last gradients, weights and buffers are; None if not compared."""
    different: str
    """As JSON: names of what differs."""
    cached_plan_seconds: float | None
    """Median over planned steps whose plan came from the cache."""
    new_plan_seconds: float | None

    @property
    def is_as_expected(self) -> bool:
        """Whether the outcome is the one expected, and is said."""
        return self.outcome == self.expected and self.says in (
            f"{self.message}\n{self.reasons}"
        )


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train in every setting, and judge what came of it."""
    names = list(options.cases or SETTINGS)
    rows: list[SettingRow] = []
    for said in said_by("settings", settings, settings=names, steps=options.steps):
        rows.append(SettingRow(**said, **settings.provenance()))
        progress(f"settings {said['setting']}: {said['outcome']}")
    return Answer(
        rows=[*rows],
        table=[_summarise(row) for row in rows],
        bars=_judge(rows),
        notes=_notes(rows),
        is_text=True,
    )


def _summarise(row: SettingRow) -> dict[str, object]:
    return {
        "setting": row.setting,
        "outcome": row.outcome,
        "equal": {True: "yes", False: "NO", None: ""}[row.is_equal],
        "over": row.over,
        "budget MiB": mebibytes(row.budget_bytes),
        "planned": f"{row.planned}/{row.records}",
        "mixed": row.mixed,
        "first plan": row.first_plan,
        "recomputed": f"{row.recomputed}/{row.calls}",
        "said": _said(row),
    }


def _said(row: SettingRow) -> str:
    if row.outcome in ("refused", "error"):
        return row.message.splitlines()[0][:160]
    reasons: Mapping[str, int] = json.loads(row.reasons)
    last = max(reasons, key=lambda reason: reasons[reason], default="")
    return last[:100] if row.outcome == "recomputed" else ""


def _notes(rows: Sequence[SettingRow]) -> list[str]:
    firsts = [row.first_plan for row in rows if row.first_plan is not None]
    cached = [r.cached_plan_seconds for r in rows if r.cached_plan_seconds is not None]
    new = [r.new_plan_seconds for r in rows if r.new_plan_seconds is not None]
    outcomes = dict(Counter(row.outcome for row in rows))
    lines = [f"outcomes: {outcomes}"]
    if firsts:
        lines.append(
            f"first step in phase plan: median {quantile(firsts, 0.5)}, latest "
            f"{max(firsts)}"
        )
    for what, values in (("from the cache", cached), ("new", new)):
        if values:
            micro = (quantile(values, 0.5) or 0.0) * 1e6
            lines.append(f"plan_seconds, {what}, median: {micro:.0f} µs")
    return lines


def _judge(rows: Sequence[SettingRow]) -> list[Bar]:
    strange = [row.setting for row in rows if not row.is_as_expected]
    different = [row.setting for row in rows if row.is_equal is False]
    over = sum(row.over for row in rows)
    return [
        Bar(f"settings with another outcome {_listed(strange)}", len(strange), 0),
        Bar(f"settings whose results differ {_listed(different)}", len(different), 0),
        Bar("steps over the budget", over, at_most=0),
    ]


def _listed(names: Sequence[str]) -> str:
    return f"({', '.join(names) or 'none'})"


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train in each setting, bare and within a budget.

    Each in processes of its own where the device outlives a fork: memory that a run
    before has left would lie in the way of the next.
    """
    importlib.import_module("torch._dynamo")  # once, not in every copy
    can_fork = kind_of(task["device"]) in ("cpu", SIM)
    for name in task["settings"]:
        trial = Trial(SETTINGS[name], task)
        if not can_fork:
            yield trial.run(trial.needs())
            continue
        try:
            needs = apart(trial.needs)
            yield apart(partial(trial.run, needs))
        except DiedError as error:
            yield trial.died(str(error))
