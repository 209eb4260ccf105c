"""The public surface: `attach` a planner to a model, and the `Session` it returns."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from torch import nn
from torch.utils.checkpoint import CheckpointError

from mimose.budget import format_bytes, parse_budget
from mimose.decide.policy import Memory, Policy
from mimose.exact.handed import Knowledge
from mimose.exact.random_state import refuse_unsaveable
from mimose.exceptions import (
    AlreadyAttachedError,
    BudgetError,
    MimoseError,
    RecomputationError,
    StateMismatchError,
)
from mimose.learn.estimator import Estimator
from mimose.measure.meters import AllocatorMeter, BasicMeter, Meter, make_meter
from mimose.measure.out_of_memory import is_out_of_memory
from mimose.planners import Planner, PlanningProblem, lay_out, make_planner
from mimose.predictors import Margin, make_predictor
from mimose.records import Records, Summary
from mimose.report import text as _report
from mimose.report.columns import terminal_width
from mimose.run.device_checks import DeviceChecks
from mimose.run.driver import Driver, RootPatch
from mimose.run.events import EventRunner, UnitPatch
from mimose.run.findings import Findings
from mimose.run.footprint import make_footprint
from mimose.run.optimizer_watch import OptimizerWatch
from mimose.run.recovery import Gradients
from mimose.run.unit import Unit
from mimose.state import describe, refuse_other
from mimose.types import KEEP, RECOMPUTE, StepFacts
from mimose.watch.compiled import COMPILED_CALL, OneGraph, refuse_compiled
from mimose.watch.kv_cache import WithoutCache, caching_modules, tell_of_cache
from mimose.watch.patch import Patch
from mimose.watch.placement import only_device
from mimose.watch.size_table import SizeTable
from mimose.watch.units import UnitsSpec, find_units, refuse_other_checkpointing

_log = logging.getLogger(__name__)

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Those that live."""


def attach(
    model: nn.Module,
    budget: float | str,
    *,
    units: UnitsSpec = None,
    actions: Sequence[str] = (KEEP, RECOMPUTE),
    planner: str | Planner = "auto",
    predictor: str | Callable[[], Any] = "polynomial",
    round_to: int | Mapping[str, int] = 1,
    cache_size: int = 1024,
    refine: bool = True,
    on_infeasible: str = "raise",
    meter: Meter | BasicMeter | str | None = None,
    record_to: str | PathLike[str] | None = None,
    max_records: int = 10_000,
    hard_limit: bool = False,
) -> Session:
    """Plan every training step of a model within a memory budget.

    The loop stays as it is. Each forward of the model in training mode, with grad
    enabled, gets a plan for the shape of its inputs: which layers keep their
    activations, and which recompute them in backward. Evaluation passes straight
    through. Gradients, random state and buffers are bit for bit those of the bare
    model.

    Args:
        model: The model, on its device. Its names, `state_dict` and configuration do
            not change.
        budget: The most bytes the device (on CPU: the process's resident set) may
            hold at any moment of a step, parameters, gradients and optimizer state
            included: ``"6GiB"``, ``"6GB"``, an integer number of bytes, a float in
            (0, 1] or ``"80%"``, a fraction of the device's memory, or ``"+400MiB"``,
            so much more than is held at attach.
        units: The modules to plan for: None to discover them, a module class, a
            qualified name, several of these, or a predicate over ``(module)`` or
            ``(name, module)``.
        actions: What may happen to a layer's activations.
        planner: ``"auto"``, ``"marginal"``, ``"optimal"``, ``"greedy"`` (Mimose's
            Algorithm 1), ``"none"``, ``"full"``, ``"every-K"``, or a `Planner` such as
            `mimose.planners.Static`.
        predictor: ``"polynomial"`` or one of the alternatives of Mimose's Table IV
            (see `mimose.predictors.make_predictor`), or what makes one.
        round_to: Sizes are rounded up to a multiple of this when a plan is made, so
            that near shapes share it: one for all sizes but the batch, or by name
            (``{"input_ids.1": 8}``).
        cache_size: The most plans kept.
        refine: Reserved for the background refiner; plans are not refined yet.
        on_infeasible: ``"raise"`` or ``"warn"`` and train on with the least plan.
        meter: Where memory is read: None to choose by the device, a name or an object
            (see `mimose.measure.meters.make_meter`).
        record_to: A file to append each step's record to, as a line of JSON. Its
            folder is made if it is not there.
        max_records: How many steps' records are kept in memory, the last ones: about
            half a kB each.
        hard_limit: Whether the accelerator's allocator is to fail rather than pass the
            budget, as long as the session lives
            (``set_per_process_memory_fraction``).

    Returns:
        The session; also a context manager.

    Raises:
        BudgetError: The budget cannot be read, or no wall can be set at it.
        InfeasibleBudgetError: More than the budget is held already.
        NoUnitsError: No modules to plan for were found.
        AlreadyAttachedError: The model has a session already.
        CheckpointingConflictError: The model's own checkpointing is switched on.
        MimoseError: The model is compiled, a CUDA graph, or on several devices.
        ValueError: Another argument is none of those above.
        TypeError: The model is no module.
    """
    _check_choices(actions, on_infeasible, cache_size, max_records, round_to)
    if isinstance(predictor, str):
        make_predictor(predictor)
    del refine
    return Session(
        model,
        budget,
        units=units,
        planner=make_planner(planner),
        predictor=predictor,
        round_to=round_to,
        cache_size=cache_size,
        warns=on_infeasible == "warn",
        meter=meter,
        record_to=record_to,
        max_records=max_records,
        hard_limit=hard_limit,
    )


def _check_choices(
    actions: Sequence[str],
    on_infeasible: str,
    cache_size: int,
    max_records: int,
    round_to: int | Mapping[str, int],
) -> None:
    if tuple(actions) != (KEEP, RECOMPUTE):
        msg = f"actions must be ('keep', 'recompute'), got {tuple(actions)!r}"
        raise ValueError(msg)
    if on_infeasible not in ("raise", "warn"):
        msg = f"on_infeasible must be 'raise' or 'warn', got {on_infeasible!r}"
        raise ValueError(msg)
    for name, count in (("cache_size", cache_size), ("max_records", max_records)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            msg = f"{name} must be an integer of at least 1, got {count!r}"
            raise ValueError(msg)
    steps = list(round_to.values()) if isinstance(round_to, Mapping) else [round_to]
    if any(isinstance(step, bool) or not isinstance(step, int) for step in steps):
        msg = (
            f"round_to must be an integer, or map sizes' names to integers, as in "
            f"{{'input_ids.1': 8}}, got {round_to!r}"
        )
        raise ValueError(msg)
    if any(step < 1 for step in steps):
        msg = f"round_to must be at least 1 for every size, got {round_to!r}"
        raise ValueError(msg)


class Session:
    """The planner of one model, from `attach` until `detach`.

    A context manager; leaving it detaches.

    Attributes:
        budget_bytes: The budget.
        records: The last steps' `StepRecord`, a bounded sequence, oldest first.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: float | str,
        *,
        units: UnitsSpec,
        planner: Planner,
        predictor: str | Callable[[], Any],
        round_to: int | Mapping[str, int],
        cache_size: int,
        warns: bool,
        meter: Meter | BasicMeter | str | None,
        record_to: str | PathLike[str] | None,
        max_records: int,
        hard_limit: bool,
    ) -> None:
        _refuse_no_model(model)
        _refuse_second(model)
        refuse_other_checkpointing(model)
        found = find_units(model, units)
        refuse_compiled(model, [module for _, module in found])
        device = only_device(model)
        checks = DeviceChecks(model, device)
        refuse_unsaveable(device)
        self._model = model
        self._device = device
        self._predictor = getattr(predictor, "__qualname__", str(predictor))
        self._meter = make_meter(meter, device)
        self.budget_bytes = parse_budget(
            budget, self._meter.total_bytes(), self._meter.held_bytes
        )
        self._estimator = Estimator(predictor, self._meter.noise_bytes)
        margin = Margin(noise_bytes=5 * self._meter.noise_bytes)
        self._policy = Policy(
            self._estimator,
            planner,
            margin,
            round_to,
            cache_size,
            raises=not warns and not self._meter.reads_peak,
        )
        self.records = Records(max_records, record_to)
        names = [name for name, _ in found]
        self._findings = Findings(names, self._estimator, self._policy)
        knowledge = Knowledge()
        self._units = [
            Unit(i, name, module, self._findings, knowledge)
            for i, (name, module) in enumerate(found)
        ]
        self._events = EventRunner(
            self._units, self._estimator, device, model, knowledge
        )
        records = self.records
        self._footprint = make_footprint(self._meter, self.budget_bytes)
        self._optimizers = OptimizerWatch(
            model,
            self._meter,
            lambda: records[-1].step if records else -1,
            on_stepped=self._footprint.optimizer_stepped,
        )
        self._driver = Driver(
            model=model,
            device=device,
            footprint=self._footprint,
            budget_bytes=self.budget_bytes,
            planner=planner,
            policy=self._policy,
            estimator=self._estimator,
            events=self._events,
            meter=self._meter,
            optimizers=self._optimizers,
            checks=checks,
            records=self.records,
            findings=self._findings,
            warns=warns,
        )
        self._patches: list[Patch] = []
        self._undo = contextlib.ExitStack()
        self._finalizer: Any = None
        self._install(hard_limit=hard_limit)

    def _install(self, *, hard_limit: bool) -> None:
        try:
            self._driver.refuse_held()
            self._tell_of_others()
            if hard_limit:
                self._undo.callback(_wall(self._meter, self.budget_bytes))
            self._optimizers.start()
            self._undo.callback(self._optimizers.remove)
            if any(unit.is_compiled for unit in self._units):
                self._undo.enter_context(OneGraph())
            self._finalizer = weakref.finalize(self._model, self._undo.close)
            caching = caching_modules(self._model)
            if caching:
                tell_of_cache(caching)
            for unit in self._units:
                self._patches.append(UnitPatch(unit, self._events))
            self._patches.append(RootPatch(self._model, self._driver))
            self._patches.extend(WithoutCache(module) for module in caching)
        except BaseException:
            self.detach()
            raise
        _log.info(
            "mimose: planning %d units of %s within %s",
            len(self._units),
            type(self._model).__name__,
            format_bytes(self.budget_bytes),
        )

    def _tell_of_others(self) -> None:
        """Say that sessions on one device take each other's readings away."""
        others = [s for s in _sessions if s._device == self._device]
        if others:
            _log.warning(
                "mimose: a session plans %s on %s already: each resets the peak that "
                "the other reads, so a step over its budget may go unseen. Detach the "
                "session if it is done; else attach one to a module that holds both "
                "models, or to the larger alone",
                " and ".join(sorted({type(s._model).__name__ for s in others})),
                self._device,
            )
        _sessions.add(self)

    def detach(self) -> None:
        """Give the model back as it was; the records stay readable. Harmless twice."""
        _sessions.discard(self)
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()
        self._undo.close()
        if self._finalizer is not None:
            self._finalizer.detach()  # it would keep the meter's files open
        self._driver.finish()
        self.records.close_file()

    def __enter__(self) -> Session:
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    @property
    def peak_bytes(self) -> int:
        """The highest reading since the session began, optimizer steps included.

        The session resets the device's peak counter; use this in its place.
        """
        return self._driver.peak_bytes

    def step(self, closure: Callable[[], Any]) -> Any:
        """Run a forward and its backward; once more, from the start, if they fail.

        Running out of memory in backward cannot be hidden from a user's loop. This
        can: gradients, random state and running statistics are put back, and the
        closure is run again with everything recomputed. A layer that turned out not
        to be recomputable is kept in the second run. Where gradients are there
        already (accumulation), a copy of them is held meanwhile.

        Args:
            closure: Runs forward and backward, and returns anything, such as the loss.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: It failed again, or in another way.
        """
        gradients = Gradients(self._model)
        snapshot = self._driver.rollback.snapshot()
        snapshot.take()
        try:
            return closure()
        except RuntimeError as error:
            if not self._can_recover(error):
                raise
        self._driver.prepare_safest()
        snapshot.restore()
        gradients.restore()
        return closure()

    def _can_recover(self, error: RuntimeError) -> bool:
        unit = self._findings.last_recomputed
        if (
            isinstance(error, (CheckpointError, RecomputationError))
            and unit is not None
        ):
            self._findings.keep(unit, "recomputing it gave other tensors")
        elif is_out_of_memory(error):
            self._driver.note_out_of_memory()
        else:
            return False
        _log.warning(
            "mimose: a step failed (%s) and is run again", type(error).__name__
        )
        return True

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, ready for JSON: no tensors, no pickled objects.

        A session that loads it plans from its first step on, within any budget. Plans
        are not part of it: a new one takes about a millisecond.
        """
        return {
            "of": self._description(),
            "estimator": self._estimator.state_dict(),
            "policy": self._policy.state_dict(),
            "driver": self._driver.state_dict(),
            "footprint": self._footprint.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another session learned, in place of what this one has.

        The budget, the planner and `round_to` may be others.

        Args:
            state: What ``state_dict`` returned, or what came back from JSON.

        Raises:
            StateMismatchError: It is of another model, device, torch or predictor, or
                it is damaged. Nothing has changed then.
        """
        refuse_other(state, self._description())
        before = self.state_dict()
        try:
            self._load(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self._load(before)
            msg = f"the state is damaged: {type(error).__name__}: {error}"
            raise StateMismatchError(msg) from error

    def _load(self, state: Mapping[str, Any]) -> None:
        self._estimator.load_state_dict(state["estimator"])
        self._policy.load_state_dict(state["policy"])
        self._driver.load_state_dict(state["driver"])
        self._footprint.load_state_dict(state.get("footprint", {}))

    def _description(self) -> dict[str, Any]:
        return describe(
            self._model,
            self._device,
            [unit.name for unit in self._units],
            predictor=self._predictor,
            meter=type(self._meter).__qualname__,
            compiled=", ".join(unit.name for unit in self._units if unit.is_compiled),
        )

    # ------------------------------------------------------------------ telling

    def report(self, width: int | None = None) -> str:
        """Return what happened so far, as text for people.

        Args:
            width: In so many columns; None for the terminal's.
        """
        width = width or terminal_width()
        return _report.report(self.summary(), list(self.records), width)

    def summary(self) -> Summary:
        """Return the session in numbers."""
        return _report.summarise(
            self.records,
            budget_bytes=self.budget_bytes,
            peak_bytes=self.peak_bytes,
            units=len(self._units),
            cache=self._policy.cache,
            margin=self._policy.margin.fraction,
            kept_units=dict(self._findings.kept),
            **self._footprint.told(),
            inexact_units=dict(self._findings.inexact),
        )

    def explain(self, shape: Mapping[str, int] | None = None) -> str:
        """Return the plan for a shape, event by event, and which segment binds.

        Args:
            shape: Sizes by name, such as ``{"input_ids.1": 512}``; the others are as
                in the last step. None for the last step's shape.

        Raises:
            MimoseError: A name is not one of the model's, or no step with such inputs
                was measured yet.
            InfeasibleBudgetError: No plan keeps the budget at this shape.
        """
        facts, table, memory = self._asked(shape)
        problem, plan, why = self._policy.explain(facts, memory)
        index = {action: i for i, action in enumerate(problem.actions)}
        choice = np.array([index[action] for action in plan.actions], dtype=np.intp)
        return _report.explain(
            problem,
            lay_out(problem, choice),
            shape=table.named(facts.sizes),
            why=why,
            width=terminal_width(),
        )

    def planning_problem(
        self, shape: Mapping[str, int] | None = None, *, start_bytes: int | None = None
    ) -> PlanningProblem:
        """Return what a planner would be given for a shape, no margin taken off.

        Args:
            shape: Sizes by name, as for `explain`.
            start_bytes: Held when the step begins; None for what is held now.

        Raises:
            MimoseError: A name is not one of the model's, or the shape's kind of
                inputs was not measured yet.
        """
        facts, _, memory = self._asked(shape)
        if start_bytes is not None:
            memory = memory._replace(start_bytes=float(start_bytes))
        return self._policy.problem(facts, memory)

    def _asked(
        self, shape: Mapping[str, int] | None
    ) -> tuple[StepFacts, SizeTable, Memory]:
        last = self._driver.last_facts()
        if last is None:
            msg = "no step was run yet, so no shape is known; train a step first"
            raise MimoseError(msg)
        facts, table = last
        if self._estimator.pattern(facts.context) is None:
            msg = "no step with such inputs was measured yet; train a few first"
            raise MimoseError(msg)
        sizes = facts.sizes if shape is None else table.fill(shape, facts.sizes)
        return facts._replace(sizes=sizes), table, self._driver.memory_now()


def _wall(meter: Meter, budget_bytes: int) -> Callable[[], None]:
    if isinstance(meter, AllocatorMeter):
        return meter.wall(budget_bytes)
    msg = (
        "hard_limit: only an accelerator's allocator can be told to fail at a budget; "
        "on a CPU leave it out, and see 'A hard limit' in the page on budgets"
    )
    raise BudgetError(msg)


def _refuse_no_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        msg = f"a session needs a model, a torch.nn.Module, got {model!r}"
        raise TypeError(msg)


def _refuse_second(model: nn.Module) -> None:
    for name, module in model.named_modules():
        places = [module.__dict__.get(name) for name in ("forward", COMPILED_CALL)]
        if any(isinstance(p, Patch) and not p.is_removed for p in places):
            msg = (
                f"{name or 'the model'} ({type(module).__name__}) is already planned "
                f"by a session: call its detach() before attaching again"
            )
            raise AlreadyAttachedError(msg)
