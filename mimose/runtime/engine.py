"""Makes and connects all parts of a session."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

from torch import distributed, nn

from mimose.actions.base import Action
from mimose.actions.host import Host
from mimose.actions.registry import choose, menu_of, points_of
from mimose.budget import (
    Budget,
    all_there_is,
    format_bytes,
    left_free,
    parse_budget,
    rank_share,
)
from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.prices import prices_of
from mimose.cost.problem import Memory
from mimose.cost.series import kinds_of
from mimose.distributed import Ranks, find_ranks, later_waits
from mimose.exactness.findings import Findings
from mimose.exactness.layer import Layer
from mimose.exactness.rollback import Rollback
from mimose.exactness.side_effects import settle_flags
from mimose.exceptions import AlreadyAttachedError
from mimose.inputs.compiled import raise_if_compiled
from mimose.inputs.describe import Describer, SizeTable
from mimose.inputs.kv_cache import without_caches
from mimose.inputs.layers import LayersSpec, find_layers, raise_if_checkpointed
from mimose.inputs.patch import Patch
from mimose.inputs.placement import only_device
from mimose.memory.meters import Meter, make_meter
from mimose.memory.wall import OptimizerKind, OptimizerWatch, make_memory_limit
from mimose.planners import Planner
from mimose.policy import Policy
from mimose.predictors import Estimator
from mimose.records import Records
from mimose.runtime.checks import BudgetChecks
from mimose.runtime.driver import Driver
from mimose.runtime.layer_calls import LayerCalls, LayerPatch
from mimose.runtime.loss_choice import LossByRows, losses_of
from mimose.runtime.seconds import StepSeconds
from mimose.runtime.step import Steps
from mimose.runtime.unplanned import Unplanned
from mimose.runtime.watched import Ahead, ShapesToCome
from mimose.state import card_name
from mimose.torch_private import COMPILED_CALL, set_graphs_by_use
from mimose.types import StepInput
from mimose.worker import Worker

_OF_THE_MODEL = (
    "calls",
    "describer",
    "driver",
    "later_waits",
    "rollback",
    "layers",
)
"""The parts that hold the model, or layers of it."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The settings of a session; see `mimose.attach`."""

    budget: Budget | Callable[[], Budget]
    planner: Planner
    actions: Sequence[Action] = field(default_factory=lambda: choose("auto"))
    layers: LayersSpec = None
    predictor: Estimator | None = None
    cache_size: int = 1024
    warns: bool = False
    """Whether an impossible budget gives a warning instead of an error."""
    meter: Meter | str | None = None
    record_to: str | PathLike[str] | None = None
    wall: bool = True
    grace: float | str | None = None
    """By how much a backward may pass the budget; see `mimose.attach`."""
    refine: bool = True
    """Whether there is a worker thread."""
    host: Host | None = None
    """Holds tensors in the host's memory, within its budget."""
    byte_flops: float | None = None
    """What moving a byte costs; see `mimose.attach`."""
    checks: str = "sampled"
    """What calls compare that rebuild tensors; see `mimose.attach`."""
    agree: Any = "auto"
    """Which ranks agree on plans: see `mimose.distributed.find_ranks`."""


def make_engine(model: nn.Module, options: Options) -> Engine:
    """Make a session's engine. If ranks agree, an error on one is an error on all.

    Args:
        model: The model.
        options: The settings.

    Raises:
        MimoseError: The model, or its device, cannot be planned for.
        OSError: The file for the records cannot be opened.
    """
    raise_if_checkpointed(model)
    found = find_layers(model, options.layers)
    modules = [module for _, module in found]
    raise_if_compiled(model, modules)
    ranks = find_ranks(options.agree, modules)
    with nullcontext() if ranks is None else ranks.sharing_errors():
        return Engine(model, options, found, ranks)


def _run_all(undo: list[Callable[[], None]]) -> None:
    """Run each, the last first. One that is interrupted runs again in the next call."""
    while undo:
        undo[-1]()
        undo.pop()


class Engine:
    """Makes the parts of a session, and connects them to the model.

    Args:
        model: The model.
        options: The settings.
        found: Names and modules of the layers.
        ranks: The ranks that agree with this one; None for none.

    Raises:
        MimoseError: The model's device cannot be planned for.
        OSError: The file for the records cannot be opened.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        found: Sequence[tuple[str, nn.Module]],
        ranks: Ranks | None,
    ) -> None:
        self.options = options
        self._patches: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self.device = only_device(model)
        settle_flags(self.device)
        self.ranks, self.later_waits = ranks, None
        names, modules = [name for name, _ in found], [module for _, module in found]
        if options.agree == "auto" and distributed.is_available():
            known = frozenset[int]() if ranks is None else ranks.waiting
            self.later_waits = later_waits(model, names, modules, known)
        self.meter = meter = make_meter(options.meter, self.device)
        self.grace_bytes = 0
        """By how much a backward may pass the budget, as a last resort."""
        self._has_used_grace = False
        budget_bytes = self.read_budget(options.budget)
        self.next_budget: int | Callable[[], Budget] | None
        self.next_budget = options.budget if callable(options.budget) else None
        """The budget of the next window; a function is called for each."""
        self.host_memory = memory = options.host and options.host.memory
        self.host_budget_bytes = float(memory.budget_bytes) if memory else math.inf
        planner = options.planner
        # A baseline chooses actions by the layer calls' positions, the same each step.
        self.action_at: Callable[[int], str] | None
        self.action_at = getattr(planner, "action_at", None)
        self.plans = self.action_at is None
        self.worker = Worker(is_inline=not options.refine)
        prices = prices_of(self.device.type, card_name(self.device), options.byte_flops)
        points = points_of(options.actions)
        if points is not None:
            points.prices, points.checks_all = prices, options.checks == "all"
        self.learner = Learner(
            CostModel(
                kinds_of(options.predictor, meter.noise_bytes),
                menu_of(options.actions),
                prices=prices,
            ),
            self.worker,
        )
        self.policy = Policy(
            self.learner,
            planner,
            meter.noise_bytes,
            options.cache_size,
            raises=not options.warns and not meter.reads_peak,
        )
        self.findings = Findings(names, self.learner)
        self.layers = [
            Layer(i, name, module, self.findings)
            for i, (name, module) in enumerate(found)
        ]
        if ranks is not None:
            ranks.restrict(self.layers, self.learner)
        self.describer = Describer(model, self.device, modules)
        self.tables = self.describer.tables
        self.last: tuple[StepInput, SizeTable] | None = None
        """The last planned step, with the names of its sizes; None before the first."""
        self.typical: tuple[StepInput, SizeTable] | None = None
        """The last planned step whose masks hide something, if there is one. If no mask
        hides anything, layers run without masks; such batches are rare."""
        self.start_bytes = 0
        """What was held when the last step without gradients began; before the first,
        what a loaded state says."""
        self.losses: tuple[LossByRows, ...] = ()
        """The model's losses that may be computed by rows; none in a baseline."""
        self.rollback = Rollback(model, self.layers, self.findings)
        self.records = Records(options.record_to)
        self.memory_limit = make_memory_limit(
            meter, budget_bytes, has_wall=options.wall and self.plans
        )
        self.seconds = seconds = StepSeconds(self.device, self.learner)
        self.unplanned = unplanned = Unplanned(model)

        def stepped(kind: OptimizerKind) -> None:
            if kind == "own":
                seconds.optimizer_ended()
            unplanned.stepped(kind)

        # All optimizers' hooks refer to these, so none of them holds the model.
        self.optimizers = OptimizerWatch(
            model, self.memory_limit, seconds.optimizer_begins, stepped
        )
        self.checks = BudgetChecks(model, self)
        self.calls = LayerCalls(model, self)
        self.steps = Steps(self)
        self.n_over = 0
        """Number of steps over their budget."""
        self.has_planned = False
        """Whether a step had a plan. The first one gets a line in the log."""
        self.ahead = Ahead(self.policy, self.memory_now)
        self.to_come = ShapesToCome(self.policy, self.learner, self.checks)
        self.driver = Driver(model, self)

    # ------------------------------------------------------------------ the budget

    def set_budget(self, budget: Budget | Callable[[], Budget]) -> None:
        """Set another budget: now if no window runs, else when the next one begins.

        Args:
            budget: As for `mimose.attach`. A function is called for each window.

        Raises:
            BudgetError: It cannot be read.
            InfeasibleBudgetError: More is held already; the budget stays the same.
        """
        if callable(budget):
            self.next_budget = budget
            return
        n_bytes = self.read_budget(budget)
        is_later = self.driver.is_within_window()
        if not is_later:
            self.move_budget(n_bytes)
        self.next_budget = n_bytes if is_later else None

    def move_budget(self, n_bytes: int) -> None:
        """Set the budget to a number of bytes now."""
        if n_bytes != self.memory_limit.budget_bytes:
            if self.plans:
                self.checks.raise_if_held(n_bytes)
            self.memory_limit.move(n_bytes)

    def read_budget(self, budget: Budget | Callable[[], Budget]) -> int:
        """Return a budget, or what a function returns, in bytes."""
        if callable(budget):
            budget = budget()
        meter, is_cpu = self.meter, self.device.type == "cpu"
        total = meter.total_bytes()
        if is_cpu:
            total = rank_share(total)
        grace = self.options.grace
        self.grace_bytes = parse_budget(grace, total) if grace else 0
        if budget is not None:
            return parse_budget(budget, total, meter.held_bytes)
        if grace is None and total is not None:
            self.grace_bytes = int(left_free(total))
        has_ranks = distributed.is_available() and distributed.is_initialized()
        return all_there_is(
            str(self.device), total, is_shared=is_cpu, has_ranks=has_ranks
        )

    # ------------------------------------------------------------------ the model

    def attach(self, model: nn.Module, owner: object) -> None:
        """Replace the forwards of the model and its layers.

        Ranks that agree first check that their layers, actions and planners are equal.

        Args:
            model: The model.
            owner: The session; `owner_of` finds it.

        Raises:
            InfeasibleBudgetError: More than the budget is held already.
            MimoseError: The ranks differ in these.
        """
        with nullcontext() if self.ranks is None else self.ranks.sharing_errors():
            if self.plans:
                self.checks.raise_if_held(self.memory_limit.budget_bytes)
            if self.ranks is not None:
                self.ranks.meet(
                    (
                        f"the actions {', '.join(self.learner.model.menu.names)}",
                        f"the planner {_name_of(self.options.planner)!r}",
                        *(f"a layer {layer.name!r}" for layer in self.layers),
                    )
                )
        self._undo += (self.memory_limit.drop_wall, self.optimizers.remove)
        self.optimizers.start()
        self.findings.on_compiled = self._use_one_graph
        self.findings.on_out_of_memory = self.use_grace
        if any(layer.is_compiled for layer in self.layers):
            self._use_one_graph()
        self._finalizer = weakref.finalize(model, _run_all, self._undo)
        for layer in self.layers:
            self._patches.append(LayerPatch(layer, self.calls))
        self._patches.append(Patch(model, self.driver.enter))
        for patch in self._patches:
            patch.owner = owner
        self._patches.extend(without_caches(model))
        if self.plans:
            self.losses = tuple(losses_of(model))
            self._patches.extend(self.losses)

    def _use_one_graph(self) -> None:
        """Have compiled code choose its graph alike: [Regional compilation]."""
        set_graphs_by_use(False)
        self._undo.append(partial(set_graphs_by_use, True))

    def detach(self) -> None:
        """Restore the model. A second call does nothing."""
        for patch in reversed(self._patches):
            patch.remove()
        if self._patches:
            self._finalizer.detach()  # it would keep the meter's files open
        self._patches.clear()
        _run_all(self._undo)

    def end(self) -> None:
        """Close everything, and release the model. A second call does nothing.

        What was learned stays.
        """
        self.ahead.close()
        try:
            if "driver" in vars(self):
                self.steps.finish()
                self.unplanned.finish()
                self.memory_limit.close()
                self.meter.release()
                self.worker.catch_up()
        finally:
            self.worker.close()
            self.records.close_file()
            self.losses = ()
            for name in _OF_THE_MODEL:  # fewer where Ctrl-C broke this off before
                vars(self).pop(name, None)

    # ------------------------------------------------------------------ reporting

    def use_grace(self) -> None:
        """Let the rest of the step that runs pass the budget by the grace."""
        grace = self.grace_bytes
        if self.memory_limit.allow_grace(grace) and not self._has_used_grace:
            self._has_used_grace = True
            _log.warning(
                "mimose: a backward has too little room, and its forward cannot run "
                "again, so it may pass the budget by the grace of %s. The records of "
                "such steps say by how much they were over",
                format_bytes(grace),
            )

    def memory_now(self) -> Memory:
        """Return the memory as if a step began now."""
        start = self.meter.live_bytes()
        return self.memory_limit.memory(start, self.host_budget_bytes)

    def _loaded(self) -> tuple[StepInput, SizeTable] | None:
        """Return the last step of a loaded state, and the names of its sizes."""
        for context, pattern in reversed(self.learner.model.patterns.items()):
            table = self.tables.get(pattern.structure)
            if table is not None and pattern.rows:
                sizes = pattern.rows[-1].root
                return StepInput(context, sizes, False, pattern.structure), table
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as JSON values."""
        return {
            "cost_model": self.learner.state_dict(),
            "policy": self.policy.state_dict(),
            "sizes": {key: t.state_dict() for key, t in self.tables.items()},
            "start_bytes": self.start_bytes,
            "kept_units": dict(self.findings.kept),
            "memory_limit": self.memory_limit.state_dict(),
            "seconds": self.seconds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self.learner.load_state_dict(state["cost_model"])
        if self.ranks is not None:
            self.ranks.restrict(self.layers, self.learner)
        self.policy.load_state_dict(state["policy"])
        for pattern in self.learner.model.patterns.values():
            self.calls.gauges.load(pattern.calls)
        self.describer.load_state_dict(state["sizes"])
        if not self.steps.n_begun:  # else it is a step of this session
            self.last = self._loaded()
        self.start_bytes = int(state.get("start_bytes", 0))
        self.memory_limit.load_state_dict(state.get("memory_limit", {}))
        self.seconds.load_state_dict(state.get("seconds", {}))
        self.findings.load_state_dict(state["kept_units"])


def _name_of(planner: Planner) -> str:
    name = getattr(planner, "name", None)
    return name if isinstance(name, str) else type(planner).__qualname__


def _find_attached(model: nn.Module) -> tuple[str, nn.Module, Patch] | None:
    """Return the first module that a session plans, with its name and its patch."""
    for name, module in model.named_modules():
        for place in ("forward", COMPILED_CALL):
            patch = module.__dict__.get(place)
            if isinstance(patch, Patch) and not patch.is_removed:
                return name, module, patch
    return None


def owner_of(model: nn.Module) -> Any:
    """Return the session that plans the model, or a part of it; None if none does."""
    found = _find_attached(model)
    return None if found is None else found[2].owner


def raise_if_attached(model: nn.Module) -> None:
    """Check that no session plans the model, or a part of it, already.

    Raises:
        AlreadyAttachedError: One does.
    """
    found = _find_attached(model)
    if found is not None:
        name, module, _ = found
        msg = (
            f"{name or 'the model'} ({type(module).__name__}) is already planned by a "
            f"session: call mimose.detach(model) before you attach again, or go on "
            f"with that session, mimose.session_of(model)"
        )
        raise AlreadyAttachedError(msg)
