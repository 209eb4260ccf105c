"""Ways to train within a budget, all behind one small interface.

Here are those of this library's own session; `paper` has the published system and
`peers` what other libraries offer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch import nn

from mimose.bench.device import is_cpu
from mimose.bench.grid.menu import ALL as ALL
from mimose.bench.grid.menu import ALL_MENU as ALL_MENU
from mimose.bench.grid.menu import BETWEEN as BETWEEN
from mimose.bench.grid.menu import EVERYTHING as EVERYTHING
from mimose.bench.grid.menu import FINE as FINE
from mimose.bench.grid.menu import WHOLE_LAYERS as WHOLE_LAYERS
from mimose.bench.grid.menu import menu_named as menu_named
from mimose.bench.grid.traces import Sizes
from mimose.measure.meters import Meter
from mimose.planners import (
    Everywhere,
    Menu,
    Optimal,
    Plan,
    Planner,
    PlanningProblem,
    Static,
)
from mimose.session import Session, attach
from mimose.watch.units import UnitsSpec


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
    units: UnitsSpec = None
    """The modules that the workload wants planned; None to discover them."""

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
    """A letter for each layer's call, as the session's menu has it: k kept, r
    recomputed."""


class Applied:
    """A strategy at work on a model; by default it does nothing."""

    budget_bytes: int | None = None
    """What it was told; None if it was told nothing."""

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the same batches, for strategies that look ahead."""
        return batches

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
    is_exact: bool = True
    """Whether gradients are those of plain training, to the last bit."""


class _Planned(Applied):
    """A session of this library.

    Args:
        session: The session.
        menu: The actions that it chooses among.
    """

    def __init__(self, session: Session, menu: Menu) -> None:
        self._session = session
        self._menu = menu
        self.budget_bytes = session.budget_bytes

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Read the shapes of the batches to come, as in a user's loop."""
        return iter(self._session.watch(batches))

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
            plan=self._menu.codes(record.actions),
        )

    def close(self) -> None:
        """Detach."""
        self._session.detach()


_Actions = str | tuple[str, ...]
_MOST_PASSES = 16
"""Over all sizes, to learn beforehand."""
_AMPLE_BYTES = 2**50


def _attach(
    setup: Setup, budget_bytes: int, planner: str | Planner, actions: _Actions
) -> Session:
    return attach(
        setup.model,
        budget_bytes,
        units=setup.units,
        actions=actions,
        planner=planner,
        meter=setup.meter,
        on_infeasible="warn",
    )


def _planned(setup: Setup, planner: str | Planner, actions: _Actions) -> Applied:
    session = _attach(setup, setup.budget_bytes(), planner, actions)
    return _Planned(session, menu_named(actions))


def _by_name(
    planner: str, actions: _Actions = WHOLE_LAYERS
) -> Callable[[Setup], Applied]:
    return lambda setup: _planned(setup, planner, actions)


def _static(setup: Setup) -> Applied:
    return _planned(setup, Static(shape=_named(setup)), WHOLE_LAYERS)


def _named(setup: Setup) -> Mapping[str, int]:
    """Return the longest sizes by the names a session gives them.

    A session names sizes by argument and dimension; a step on the longest batch tells.
    """
    with _attach(setup, _AMPLE_BYTES, "auto", "exact") as session:
        setup.try_step(setup.longest)
        shape: Mapping[str, int] = session.records[-1].shape
    return shape


# ------------------------------------------------------------------ told beforehand


class Oracle:
    """The exact optimum within the whole budget: no margin is left."""

    name = "oracle"

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = float(budget_bytes)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Solve the problem with the budget as it was given."""
        whole = dataclasses.replace(problem, budget_bytes=self._budget_bytes)
        return Optimal().plan(whole)


def _oracle(actions: _Actions) -> Callable[[Setup], Applied]:
    """Learn on every size of the trace beforehand, then plan each exactly."""
    return lambda setup: _told(setup, Oracle, actions)


def _static_told(setup: Setup) -> Applied:
    """Learn as the oracle does: what its one plan is made from is never better known.

    A session on its own makes the plan as soon as it trusts predictions, before it has
    tried what lies between keeping and recomputing.
    """
    planner = Static(shape=_named(setup))
    return _told(setup, lambda _: planner, FINE)


def _told(
    setup: Setup, make_planner: Callable[[int], Planner], actions: _Actions
) -> Applied:
    """Return a session that has learned on every size of the trace beforehand.

    The planner is made with the budget, which what learning has left held is part of.
    """
    name = "-".join(menu_named(actions).names)
    path = setup.shared / f"learned-{name}-{setup.headroom_bytes}.json"
    with FileLock(path.with_suffix(".lock")):  # another may be told the same
        if not path.exists():
            path.write_text(json.dumps(_learned(setup, actions)), "utf-8")
        learned = json.loads(path.read_text("utf-8"))
    budget_bytes = setup.budget_bytes()
    session = _attach(setup, budget_bytes, make_planner(budget_bytes), actions)
    session.load_state_dict(learned)
    return _Planned(session, menu_named(actions))


def _learned(setup: Setup, actions: _Actions) -> Mapping[str, Any]:
    """Run every size within the budget; then until every action was tried.

    An action is tried in place of what would be kept, so budgets are ample for that.
    """
    with _attach(setup, setup.budget_bytes(), "auto", actions) as teacher:
        _shows_more(setup, teacher)
        learned = teacher.state_dict()
    if actions == WHOLE_LAYERS:
        return learned
    with _attach(setup, _AMPLE_BYTES, "auto", actions) as teacher:
        teacher.load_state_dict(learned)
        for _ in range(_MOST_PASSES):
            if not _shows_more(setup, teacher):
                break
        return teacher.state_dict()


def _shows_more(setup: Setup, teacher: Session) -> bool:
    """Run every size once; return whether an action was still to be tried in one."""
    shows = False
    for sizes in {tuple(each.items()): each for each in setup.sizes}.values():
        setup.try_step(sizes)
        record = teacher.records[-1]
        shows |= record.phase == "plan" and record.predicted_growth_bytes is None
    return shows


# ------------------------------------------------------------------ one for all


def _everywhere(action: str) -> Strategy:
    first, last = WHOLE_LAYERS
    spec = ALL_MENU.spec(action)
    return Strategy(
        action,
        f"every layer under {action!r}",
        lambda setup: _planned(setup, Everywhere(action), (first, action, last)),
        why_not=_only_beside_a_host if spec.needs_host else lambda _: "",
        is_exact=spec.is_exact,
    )


def _only_beside_a_host(kind: str) -> str:
    return "a model on a CPU is on the host already" if is_cpu(kind) else ""


OWN = (
    Strategy("none", "keep everything: plain training", lambda _: Applied()),
    Strategy("full", "recompute every layer", _by_name("full")),
    Strategy("every-2", "recompute every second layer", _by_name("every-2")),
    Strategy(
        "static", "one plan, made for the longest batch", _static, heeds_budget=True
    ),
    Strategy(
        "mimose",
        "this library as it comes: a plan for every shape, learned while training",
        _by_name("auto", "exact"),
        heeds_budget=True,
    ),
    Strategy(
        "oracle",
        "the exact optimum for every shape, all measured beforehand",
        _oracle(WHOLE_LAYERS),
        heeds_budget=True,
    ),
    Strategy(
        "static-menu",
        "one plan for the longest batch, of all exact actions, measured beforehand",
        _static_told,
        heeds_budget=True,
    ),
    Strategy(
        "mimose-menu",
        "this library, with all exact actions",
        lambda setup: _planned(setup, "auto", FINE),
        heeds_budget=True,
    ),
    Strategy(
        "oracle-menu",
        "the exact optimum of all exact actions, all measured beforehand",
        _oracle(FINE),
        heeds_budget=True,
    ),
    Strategy(
        "eviction",
        "evict where the step is full, in the manner of DTR (simulated)",
        _by_name("eviction"),
        heeds_budget=True,
    ),
    Strategy(
        "mimose-all",
        "this library, with all actions, lossy ones and those of the host among them",
        lambda setup: _planned(setup, "auto", EVERYTHING),
        heeds_budget=True,
        is_exact=False,
    ),
    Strategy(
        "oracle-all",
        "the exact optimum of all actions, all measured beforehand",
        _oracle(EVERYTHING),
        heeds_budget=True,
        is_exact=False,
    ),
    *map(_everywhere, BETWEEN),
)
"""The strategies of this library, plain training among them."""
