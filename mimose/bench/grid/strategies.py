"""Ways to train within a budget, all behind one small interface.

Here are those of this library's own session; `paper` has the published system and
`peers` what other libraries offer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from mimose.bench.grid.traces import Sizes
from mimose.measure.meters import Meter
from mimose.planners import Optimal, Plan, Planner, PlanningProblem, Static
from mimose.planners.actions import EXACT_MENU
from mimose.session import Session, attach


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a strategy is given before training begins."""

    model: nn.Module
    device: torch.device
    meter: Meter
    headroom_bytes: int
    """For a step's growth; very large for strategies that know no budget."""
    sizes: Sequence[Sizes]
    """Of the batches to come."""
    longest: Sizes
    """Of the batch that needs most memory."""
    loss: Callable[[nn.Module, Mapping[str, int]], torch.Tensor]
    """Runs a model's forward on a batch of these sizes; takes the model, or a copy."""
    try_step: Callable[[Mapping[str, int]], None]
    """Runs a forward and a backward on a batch of these sizes, and drops gradients."""
    shared: Path
    """A folder that all processes of a workload share."""

    def budget_bytes(self) -> int:
        """Return what is held now and the headroom: the budget, if training began."""
        return self.meter.settled_bytes(0) + self.headroom_bytes


class Facts(NamedTuple):
    """What a strategy says of the step that it has just taken."""

    phase: str = ""
    predicted_growth_bytes: float | None = None
    recomputed_flops: int | None = None
    """None where it cannot tell: then it is counted in a step of its own."""
    plan_seconds: float = 0.0
    cache_hit: bool = False
    retries: int = 0
    plan: str = ""
    """A letter for each layer's call: k kept, r recomputed."""


class Applied:
    """A strategy at work on a model; by default it does nothing."""

    budget_bytes: int | None = None
    """What it was told; None if it was told nothing."""

    def before_step(self, sizes: Mapping[str, int]) -> None:
        """Get ready for a batch of these sizes."""

    def facts(self) -> Facts:
        """Tell about the last step."""
        return Facts()

    def phase_of(self, phase: str) -> None:
        """Behave as in a phase that is over, for counting."""

    def close(self) -> None:
        """Give the model back as it was."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to train."""

    name: str
    what: str
    """One line for people."""
    apply: Callable[[Setup], Applied]
    heeds_budget: bool = False
    """Whether it does something else at another budget."""
    why_not: Callable[[str], str] = lambda _: ""
    """Takes a kind of device; says why it cannot run there, or nothing."""
    is_counted: bool = True
    """Whether its FLOPs can be counted where it does not tell them itself."""


class _Planned(Applied):
    """A session of this library."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.budget_bytes = session.budget_bytes

    def facts(self) -> Facts:
        """Return what the session has recorded."""
        record = self._session.records[-1]
        return Facts(
            phase=record.phase,
            predicted_growth_bytes=record.predicted_growth_bytes,
            recomputed_flops=record.recomputed_flops,
            plan_seconds=record.plan_seconds,
            cache_hit=record.cache_hit,
            retries=record.retries,
            plan=EXACT_MENU.codes(record.actions),
        )

    def close(self) -> None:
        """Detach."""
        self._session.detach()


def _attach(setup: Setup, budget_bytes: int, planner: str | Planner) -> Session:
    return attach(
        setup.model,
        budget_bytes,
        planner=planner,
        meter=setup.meter,
        on_infeasible="warn",
    )


def _by_name(planner: str) -> Callable[[Setup], Applied]:
    return lambda setup: _Planned(_attach(setup, setup.budget_bytes(), planner))


def _static(setup: Setup) -> Applied:
    planner = Static(shape=_named(setup))
    return _Planned(_attach(setup, setup.budget_bytes(), planner))


def _named(setup: Setup) -> Mapping[str, int]:
    """Return the longest sizes by the names a session gives them.

    A session names sizes by argument and dimension; a step on the longest batch tells.
    """
    with attach(setup.model, "1TiB", meter=setup.meter) as session:
        setup.try_step(setup.longest)
        shape: Mapping[str, int] = session.records[-1].shape
    return shape


class _Exact:
    """The exact optimum within the whole budget: no margin is left."""

    name = "oracle"

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = float(budget_bytes)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Solve the problem with the budget as it was given."""
        whole = dataclasses.replace(problem, budget_bytes=self._budget_bytes)
        return Optimal().plan(whole)


def _oracle(setup: Setup) -> Applied:
    """Learn on every size of the trace beforehand, then plan each exactly."""
    with _attach(setup, setup.budget_bytes(), "auto") as teacher:
        for sizes in _distinct(setup.sizes):
            setup.try_step(sizes)
        learned = teacher.state_dict()
    budget_bytes = setup.budget_bytes()
    session = _attach(setup, budget_bytes, _Exact(budget_bytes))
    session.load_state_dict(learned)
    return _Planned(session)


def _distinct(sizes: Sequence[Sizes]) -> list[Sizes]:
    return list({tuple(each.items()): each for each in sizes}.values())


OWN = (
    Strategy("none", "keep everything: plain training", lambda _: Applied()),
    Strategy("full", "recompute every layer", _by_name("full")),
    Strategy("every-2", "recompute every second layer", _by_name("every-2")),
    Strategy(
        "static", "one plan, made for the longest batch", _static, heeds_budget=True
    ),
    Strategy(
        "mimose",
        "this library: a plan for every shape, learned while training",
        _by_name("auto"),
        heeds_budget=True,
    ),
    Strategy(
        "oracle",
        "the exact optimum for every shape, all measured beforehand",
        _oracle,
        heeds_budget=True,
    ),
    Strategy(
        "eviction",
        "evict where the step is full, in the manner of DTR (simulated)",
        _by_name("eviction"),
        heeds_budget=True,
    ),
)
"""The strategies of this library, plain training among them."""
