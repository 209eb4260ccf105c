"""All who take part in a session's steps, made and put together in one place."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from torch import distributed, nn

from mimose.actions.base import Action
from mimose.actions.offload.codec import OffloadCodec
from mimose.actions.registry import (
    choose,
    load_state,
    menu_of,
    state_of,
)
from mimose.budget import all_there_is, parse_budget, rank_share
from mimose.cost.learner import Learner
from mimose.cost.model import CostModel, flops_of_a_byte, kinds_of
from mimose.cost.problem import Memory
from mimose.cost.windows import Windows
from mimose.distributed import Ranks, find_ranks, later_waits
from mimose.exactness.attributes import HeldObjects
from mimose.exactness.findings import Findings
from mimose.exactness.global_flags import settle_flags
from mimose.exactness.handed import Knowledge
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.random_state import refuse_unsaveable
from mimose.exactness.rollback import Rollback
from mimose.exactness.unit import Unit, note_shared_weights
from mimose.inputs.compiled import refuse_compiled
from mimose.inputs.describe import Describer
from mimose.inputs.layers import UnitsSpec, find_units, refuse_other_checkpointing
from mimose.inputs.placement import only_device
from mimose.inputs.sharding import communicates
from mimose.inputs.sizes import Table
from mimose.memory.meters import BasicMeter, Meter, make_meter
from mimose.memory.optimizer import OptimizerWatch
from mimose.memory.wall import make_footprint
from mimose.planners import FixedPlanner, Planner, refiner_of
from mimose.policy.policy import Policy
from mimose.policy.reserve import Reserve
from mimose.records import AgreementUse, HostUse, Records
from mimose.runtime.ahead import Ahead
from mimose.runtime.device_checks import DeviceChecks
from mimose.runtime.driver import Driver, Parts
from mimose.runtime.ending import StepEnds
from mimose.runtime.epoch import Epoch
from mimose.runtime.events import EventRunner
from mimose.runtime.open_steps import OpenSteps
from mimose.runtime.overlooked import Overlooked
from mimose.runtime.refusals import Refusals
from mimose.runtime.retry import Retry
from mimose.runtime.writers import Writers
from mimose.types import StepInput
from mimose.worker import Worker

_log = logging.getLogger(__name__)

_OF_THE_MODEL = (
    "ranks",
    "ahead",
    "describer",
    "driver",
    "events",
    "overlooked",
    "rollback",
    "units",
)
"""The parts that hold the model, or layers of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a session is asked to do; see `mimose.attach`."""

    budget: float | str | None
    planner: Planner
    actions: Sequence[Action] = field(default_factory=lambda: choose("auto"))
    units: UnitsSpec = None
    predictor: str | Callable[[], Any] = "polynomial"
    cache_size: int = 1024
    warns: bool = False
    """Whether an impossible budget warns rather than raises."""
    meter: Meter | BasicMeter | str | None = None
    record_to: str | PathLike[str] | None = None
    wall: bool = True
    refine: bool = True
    """Whether a thread works beside training, and plans are refined."""
    host: OffloadCodec | None = None
    """Holds tensors on the host, within a budget of its own."""
    agree: Any = "auto"
    """Which ranks agree on what is recomputed: see `mimose.distributed.find_ranks`."""
    reserve: Reserve | None = None
    """Another reserve than the usual, such as one with parts left out."""


def make_engine(model: nn.Module, options: Options) -> Engine:
    """Make a session's engine; where ranks agree, on all ranks or on none.

    Args:
        model: The model.
        options: What is asked for.

    Raises:
        MimoseError: The model, or its device, cannot be planned for.
        OSError: The file for the records cannot be opened.
    """
    refuse_other_checkpointing(model)
    found = find_units(model, options.units)
    modules = [module for _, module in found]
    refuse_compiled(model, modules)
    ranks = find_ranks(options.agree, [name for name, _ in found], modules)
    with nullcontext() if ranks is None else ranks.telling():
        return Engine(model, options, found, ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Past:
    """What the parts that hold the model had to tell as the session ended."""

    last: tuple[StepInput, Table] | None
    memory: Memory | None
    sizes: dict[str, Any]
    agreement_use: AgreementUse | None
    never_called: Sequence[str]
    can_go_by_rows: bool


class Engine:
    """Makes the parts, from what reads the memory to what runs the steps.

    Args:
        model: The model.
        options: What is asked for.
        found: The modules to plan for, by name.
        ranks: Those to agree with.

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
        self._options = options
        self._past: _Past | None = None
        self.device = only_device(model)
        settle_flags(self.device)
        later = None
        if options.agree == "auto":
            names, modules = [n for n, _ in found], [m for _, m in found]
            known = frozenset[int]() if ranks is None else ranks.waiting
            later = later_waits(model, names, modules, known)
        checks = DeviceChecks(model, self.device, later)
        refuse_unsaveable(self.device)
        self.meter = meter = make_meter(options.meter, self.device)
        total = meter.total_bytes()
        if self.device.type == "cpu":
            total = rank_share(total)
        if options.budget is None:
            self.budget_bytes = all_there_is(
                str(self.device),
                total,
                is_shared=self.device.type == "cpu",
                has_ranks=distributed.is_available() and distributed.is_initialized(),
            )
        else:
            self.budget_bytes = parse_budget(options.budget, total, meter.held_bytes)
        kinds = kinds_of(options.predictor, meter.noise_bytes)
        self._actions = options.actions
        self.host_memory = None if options.host is None else options.host.memory
        host_budget = math.inf
        if self.host_memory is not None:
            host_budget = float(self.host_memory.budget_bytes)
        menu = menu_of(options.actions)
        self.worker = Worker(is_inline=not options.refine)
        self.learner = Learner(
            CostModel(kinds, menu, byte_flops=flops_of_a_byte(self.device.type)),
            self.worker,
        )
        reserve = options.reserve or Reserve(meter.noise_bytes)
        self.policy = Policy(
            self.learner,
            options.planner,
            reserve,
            options.cache_size,
            raises=not options.warns and not meter.reads_peak,
            refiner=refiner_of(options.planner) if options.refine else None,
        )
        self.findings = Findings([name for name, _ in found], self.learner)
        knowledge, answers, objects = Knowledge(), LateAnswers(), HeldObjects()
        self.units = [
            Unit(i, name, module, self.findings, knowledge, answers, objects)
            for i, (name, module) in enumerate(found)
        ]
        note_shared_weights(self.units)
        self.events = EventRunner(
            self.units,
            options.actions,
            self.learner,
            self.device,
            model,
            knowledge,
            self.findings,
            answers,
            objects,
        )
        self.describer = Describer(
            model, self.device, [unit.module for unit in self.units]
        )
        self.overlooked = Overlooked(self.units, model)
        self.rollback = Rollback(model, self.units, answers, self.findings, objects)
        self.records = Records(options.record_to)
        self.footprint = make_footprint(
            meter,
            self.budget_bytes,
            has_wall=options.wall,
            is_kept=not isinstance(options.planner, FixedPlanner),
        )
        self.refusals = Refusals(
            model,
            self.footprint,
            self.budget_bytes,
            meter.noise_bytes,
            reserve.least_peaks,
            warns=options.warns,
        )
        opened = OpenSteps()
        self.windows = Windows()
        self.optimizers = OptimizerWatch(model, on_step=self.footprint.drop_wall)
        # A baseline does the same in every step, by the events' positions.
        planner = options.planner
        action_at = planner.action_at if isinstance(planner, FixedPlanner) else None
        self.plans = action_at is None
        self.ranks = ranks
        if ranks is not None:
            ranks.restrict(self.units, self.learner)
        self.writers = Writers(
            learner=self.learner,
            policy=self.policy,
            footprint=self.footprint,
            refusals=self.refusals,
            optimizers=self.optimizers,
            records=self.records,
            meter=meter,
            plans=self.plans,
        )
        ends = StepEnds(
            self.footprint,
            self.events.answers,
            self.writers,
            self.records,
            opened,
            self.windows,
            self.events.inner,
            reads_peak=meter.reads_peak,
        )
        self.ahead = Ahead(
            self.policy, self.learner, self.describer, lambda: self.driver.memory_now()
        )
        self.epoch = Epoch(self.policy, self.learner, self.refusals)
        self.driver = Driver(
            Parts(
                model=model,
                device=self.device,
                footprint=self.footprint,
                budget_bytes=self.budget_bytes,
                host_budget_bytes=host_budget,
                menu=self.learner.model.menu,
                action_at=action_at,
                learner=self.learner,
                policy=self.policy,
                events=self.events,
                meter=meter,
                optimizers=self.optimizers,
                checks=checks,
                refusals=self.refusals,
                rollback=self.rollback,
                retry=Retry(
                    model,
                    self.device,
                    self.footprint,
                    self.policy,
                    self.events,
                    self.rollback,
                ),
                describer=self.describer,
                overlooked=self.overlooked,
                windows=self.windows,
                ends=ends,
                ran=self.ahead.ran,
                epoch=self.epoch,
                ranks=ranks,
            )
        )

    def meet(self) -> None:
        """Make sure that the ranks that agree plan the same.

        Raises:
            MimoseError: They do not.
        """
        planner = getattr(self._options.planner, "name", None)
        if not isinstance(planner, str):
            planner = type(self._options.planner).__qualname__
        if self.ranks is None:
            return
        self.ranks.meet(
            (
                f"the actions {', '.join(self.learner.model.menu.names)}",
                f"the planner {planner!r}",
                *(f"a layer {unit.name!r}" for unit in self.units),
            )
        )
        reasons = ((unit.name, communicates(unit.module)) for unit in self.units)
        found = (f"in {name}, {why}" for name, why in reasons if why)
        why = next(found, "attach(agree=...) was given their group")
        n_ranks = self.ranks.use().n_ranks
        _log.info("mimose: %d ranks agree on each forward: %s", n_ranks, why)

    def end(self) -> None:
        """Close everything, and hold the model no more. Harmless twice.

        What was learned stays.
        """
        if self._past is not None:
            return
        last, memory = self.last, None
        try:
            memory = None if last is None else self.driver.memory_now()
            self.driver.finish()
            self.worker.catch_up()
            self.driver.tell_failure()
        finally:
            self.worker.close()
            self.records.close_file()
            self._past = _Past(
                last=last,
                memory=memory,
                sizes=self.describer.state_dict(),
                agreement_use=self.agreement_use,
                never_called=self.overlooked.never_called,
                can_go_by_rows=self.can_go_by_rows,
            )
            for name in _OF_THE_MODEL:
                delattr(self, name)

    @property
    def last(self) -> tuple[StepInput, Table] | None:
        """What was run last, with the names of its sizes; None before."""
        past = self._past
        return (self.driver.last or self.describer.last) if past is None else past.last

    @property
    def can_go_by_rows(self) -> bool:
        """Whether a loss of the model's goes by rows where the budget asks for it."""
        if self._past is not None:
            return self._past.can_go_by_rows
        return self.driver.loss.can_go_by_rows

    @property
    def memory(self) -> Memory:
        """What is held as if a step began; of an ended session, as it ended."""
        held = None if self._past is None else self._past.memory
        return self.driver.memory_now() if held is None else held

    @property
    def agreement_use(self) -> AgreementUse | None:
        """What ranks that agree have exchanged; None where there is one alone."""
        if self._past is not None:
            return self._past.agreement_use
        return None if self.ranks is None else self.ranks.use()

    @property
    def never_called(self) -> Sequence[str]:
        """The layers that no step has called; none before there were a few steps."""
        past = self._past
        return self.overlooked.never_called if past is None else past.never_called

    @property
    def host_use(self) -> HostUse | None:
        """What was taken of the host's memory; None where nothing may be."""
        return None if self.host_memory is None else self.host_memory.use()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, ready for JSON."""
        past = self._past
        return {
            "cost_model": self.learner.state_dict(),
            "policy": self.policy.state_dict(),
            "sizes": self.describer.state_dict() if past is None else past.sizes,
            "windows": self.windows.state_dict(),
            "kept_units": self.findings.state_dict(),
            "footprint": self.footprint.state_dict(),
            "actions": state_of(self._actions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another engine learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self.learner.load_state_dict(state["cost_model"])
        if self.ranks is not None:
            self.ranks.restrict(self.units, self.learner)
        self.policy.load_state_dict(state["policy"])
        self.describer.load_state_dict(state["sizes"])
        self.windows.load_state_dict(state.get("windows", {}))
        self.footprint.load_state_dict(state.get("footprint", {}))
        load_state(self._actions, state["actions"])
        self.findings.load_state_dict(state["kept_units"])
