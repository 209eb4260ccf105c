"""Is a tight budget kept from the first step on, and an impossible one refused?

One process measures the least that any plan can reach for one shape: everything
recomputed, AdamW's state and its steps included. Then the budget is set 3% of that
growth above, and another process has to keep it from its first step, when the state
is still to come; and 3% below, where the library has to say so, and what holds the
memory, after two steps at the most.

    python -m mimose.bench.proofs tight
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mimose.bench.proofs.child import run_child
from mimose.bench.proofs.common import Answer, Bar, Row, Settings, mebibytes
from mimose.bench.proofs.loop import Loop
from mimose.bench.proofs.models import Setup, chosen
from mimose.exceptions import InfeasibleBudgetError
from mimose.session import attach

QUESTION = "Is a tight budget kept from the first step, and an impossible one refused?"

# Wide enough that the optimizer's state is a good part of the whole.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "attn_implementation": "eager",
}
_SETUPS = (
    Setup(model="bert", sizes={"batch": (12, 12), "length": (256, 256)}, changes=_WIDE),
    Setup(
        model="gpt2",
        sizes={"batch": (8, 8), "length": (384, 384)},
        changes={"n_embd": 256},
    ),
    Setup(
        model="t5",
        sizes={"batch": (8, 8), "source": (320, 320), "target": (224, 224)},
        changes={"d_model": 256, "d_ff": 1024},
    ),
)
_SHARE = 0.03
_PROBE_STEPS = 5
_STEPS_BAR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TightRow(Row):
    """One step; the last of an impossible budget is the one that was refused."""

    model: str
    run: str
    """``"probe"``, ``"above"`` or ``"below"`` the least growth."""
    step: int
    phase: str
    """``"refused"`` where `InfeasibleBudgetError` was raised."""
    kept: int
    """Events whose activations were kept."""
    base_bytes: int
    """Held before the first step, the optimizer's state not there."""
    budget_bytes: int | None
    start_bytes: int
    peak_bytes: int
    """Read from outside, the optimizer's step included."""
    seconds: float
    holders: str
    """What holds the memory, as the error says."""

    @property
    def rise_bytes(self) -> int:
        """The peak over what was held before the first step."""
        return self.peak_bytes - self.base_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this proof's own options."""
    parser.add_argument("--steps", type=int, default=30, help="that must be kept")


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Measure the least, then train just above and just below it."""
    rows: list[TightRow] = []
    table, bars = [], []
    for setup in chosen(_SETUPS, settings.models):
        task = {"model": setup.model, "seed": settings.seed, "steps": options.steps}

        def run(name: str, share: float, task: Mapping[str, Any]) -> list[TightRow]:
            told = {**task, "run": name, "share": share}
            return [
                TightRow(**said, **settings.provenance())
                for said in run_child("tight", told, settings.threads)
            ]

        probe = run("probe", 0.0, task)
        least = max(row.rise_bytes for row in probe)
        task["least_bytes"] = least
        above, below = run("above", _SHARE, task), run("below", -_SHARE, task)
        rows += [*probe, *above, *below]
        refused = [row for row in below if row.phase == "refused"]
        over = [row for row in above if row.peak_bytes > (row.budget_bytes or 0)]
        table.append(
            {
                "model": setup.model,
                "least MiB": mebibytes(least),
                "steps above": len(above),
                "over": len(over),
                "highest of budget": _highest(above),
                "refused after": refused[0].step if refused else None,
                "holders": refused[0].holders if refused else "",
            }
        )
        bars += [
            Bar(f"{setup.model}: steps done above", len(above), at_least=options.steps),
            Bar(f"{setup.model}: steps over", len(over), 0),
            Bar(
                f"{setup.model}: steps before the refusal",
                refused[0].step if refused else None,
                _STEPS_BAR,
            ),
        ]
    return Answer(rows=rows, table=table, bars=bars)


def _highest(rows: list[TightRow]) -> float | None:
    """Return the highest rise as a share of what the budget allows."""
    shares = [
        row.rise_bytes / (row.budget_bytes - row.base_bytes)
        for row in rows
        if row.budget_bytes is not None
    ]
    return max(shares, default=None)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run one part: ``"probe"``, ``"above"`` or ``"below"``."""
    (setup,) = chosen(_SETUPS, [task["model"]])
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(setup.build(task["seed"]))
    base_bytes = loop.warm_up(setup.batch(setup.longest(), generator))
    is_probe = task["run"] == "probe"
    budget = 2**40 if is_probe else _budget(base_bytes, task)
    planner = "full" if is_probe else "auto"
    with attach(loop.model, budget, planner=planner, meter=loop.meter) as session:
        for step in range(_PROBE_STEPS if is_probe else task["steps"]):
            batch = setup.batch(setup.longest(), generator)
            start, peak, seconds, holders = loop.meter.live_bytes(), 0, 0.0, ""
            try:
                start, peak, seconds = loop.step(batch)
            except InfeasibleBudgetError as error:
                holders = ", ".join(
                    f"{name} {mebibytes(n)}" for name, n in error.holders.items()
                )
            record = session.records[-1] if session.records else None
            yield {
                "model": setup.model,
                "run": task["run"],
                "step": step,
                "phase": "refused" if holders or record is None else record.phase,
                "kept": 0 if record is None else record.actions.count("keep"),
                "base_bytes": base_bytes,
                "budget_bytes": None if is_probe else budget,
                "start_bytes": start,
                "peak_bytes": peak,
                "seconds": seconds,
                "holders": holders,
            }
            if holders:
                return


def _budget(base_bytes: int, task: Mapping[str, Any]) -> int:
    return base_bytes + int((1.0 + task["share"]) * task["least_bytes"])
