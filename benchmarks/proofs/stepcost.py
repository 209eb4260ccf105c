"""What does a step cost beyond its plan's own recomputation, on a cache hit?

Twenty-four blocks of a few microseconds are trained under the library and, by turns,
without: bare where the plan keeps, and with `torch.utils.checkpoint` called by hand
on the same blocks where it recomputes. The medians' difference is what the library
costs; the calls of functions beyond those of the bare step tell it on a busy machine.

    python -m benchmarks.proofs stepcost --threads 1
    python -m benchmarks.proofs stepcost --threads 1 --rounds 10
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Measured, Settings
from mimose.planners import Plan, PlanningProblem
from mimose.planners.timeline import judge as laid_out
from mimose.session import Session, attach

QUESTION = "What does a step cost on a cache hit, beyond checkpoint's own price?"
NEEDS = ()
OPTIONS = (
    common.count("--rounds", 60, "of each plan"),
    common.count("--steps", 50, "a round"),
)

_N_BLOCKS = 24
_WIDTH = 16
_PLANS: Mapping[str, tuple[int, ...]] = {
    "keep all": (0,) * _N_BLOCKS,
    "half": (1, 0) * (_N_BLOCKS // 2),
    "recompute all": (1,) * _N_BLOCKS,
}
_WARM_UP_STEPS = 40
_STEP_MICROS, _RECOMPUTED_MICROS = 40, 3
"""The bar for a step, and for each layer that it recomputes."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Time every plan, all in one process."""
    task = {"rounds": options.rounds, "steps": options.steps}
    rows = common.measured("stepcost", settings, **task)
    answer = Answer()
    for name, choice in _PLANS.items():
        own = [row for row in rows if row["plan"] == name]
        answer.add(name, own, *judge(own, sum(choice)), head="plan")
    return answer


def judge(rows: Sequence[Measured], n_recomputed: int) -> common.Verdict:
    """Judge the rounds of one plan."""

    def micros(column: str) -> float:
        return 1e6 * float(statistics.median(row[f"{column}_seconds"] for row in rows))

    cost = micros("attached") - micros("bare")
    line = {
        "rounds": len(rows),
        "bare µs": micros("bare"),
        "attached µs": micros("attached"),
        "cost µs": cost,
        "to decide µs": micros("decide"),
        "calls": rows[0]["attached_calls"] - rows[0]["bare_calls"],
    }
    most = _STEP_MICROS + _RECOMPUTED_MICROS * n_recomputed
    return line, [Bar("cost in µs", cost, most)]


# ------------------------------------------------------------------ in the child


class Block(nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to the same shape."""
        changed: torch.Tensor = self.narrow(torch.relu(self.wide(states)))
        return states + changed


class Blocks(nn.Module):
    """Blocks one behind another; those of `by_hand` under torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(_N_BLOCKS))
        self.by_hand: Sequence[int] = (0,) * _N_BLOCKS

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to a loss."""
        for block, is_recomputed in zip(self.blocks, self.by_hand, strict=True):
            if is_recomputed:
                states = checkpoint(block, states, use_reentrant=False)
            else:
                states = block(states)
        return states.sum()


class Told:
    """A planner that does what it is told: see `choice`."""

    name = "told"
    choice: Sequence[int] = (0,) * _N_BLOCKS
    """0 to keep and 1 to recompute, call by call."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make the plan; its budget is not read."""
        return laid_out(problem, torch.tensor(self.choice).numpy(), planner=self.name)


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Time the plans."""
    torch.manual_seed(task["seed"])
    model, bare = Blocks(), Blocks()
    bare.load_state_dict(model.state_dict())
    planner = Told()
    with attach(model, common.AMPLE_BYTES, planner=planner) as session:
        for step in range(_WARM_UP_STEPS):  # on other shapes, until plans come
            _step(model, torch.rand((4, 8, 12, 16)[step % 4], _WIDTH))
        for number, (name, choice) in enumerate(_PLANS.items()):
            planner.choice = bare.by_hand = choice
            # A shape, and so a plan, of its own
            states = torch.rand(5 + number, _WIDTH)
            own, other = partial(_step, model, states), partial(_step, bare, states)
            calls = _settled(session, own, other, choice)
            for index in range(task["rounds"]):
                bare_seconds = _seconds_a_call(other, task["steps"])
                attached_seconds = _seconds_a_call(own, task["steps"])
                records = list(session.records)[-task["steps"] :]
                yield {
                    "plan": name,
                    "round": index,
                    "attached_seconds": attached_seconds,
                    "bare_seconds": bare_seconds,
                    "decide_seconds": statistics.median(
                        record.plan_seconds for record in records
                    ),
                    **calls,
                }


def _step(model: nn.Module, states: torch.Tensor) -> None:
    model(states).backward()
    model.zero_grad(set_to_none=True)


def _settled(
    session: Session,
    own: Callable[[], None],
    other: Callable[[], None],
    choice: Sequence[int],
) -> dict[str, int]:
    """Train until the plan comes from the cache; return the calls of a step of each.

    Raises:
        RuntimeError: The step does not run under the plan.
    """
    for _ in range(10):
        own()
        other()
    record = session.records[-1]
    if not record.cache_hit or record.n_recomputed != sum(choice):
        msg = f"a step was {record.phase} ({record.reason}), not the plan {choice}"
        raise RuntimeError(msg)
    return {"attached_calls": _calls(own), "bare_calls": _calls(other)}


def _seconds_a_call(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def _calls(step: Callable[[], object]) -> int:
    """Count the functions that a step calls in this thread, Python's and others."""
    n_calls = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal n_calls
        del frame
        n_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return n_calls
