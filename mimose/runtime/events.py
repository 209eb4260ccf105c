"""Running the units' calls: kept, recomputed, or measured, as the step says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

from mimose.actions.base import Action, Probe, UnitCall
from mimose.actions.offload.away import handed_over
from mimose.cost.learner import Learner
from mimose.distributed import why_forward_waits
from mimose.exactness.attributes import HeldObjects
from mimose.exactness.findings import Findings
from mimose.exactness.handed import Knowledge
from mimose.exactness.input_watch import Marks, cut_off, is_edited
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.structure import Structure
from mimose.exactness.unit import Unit, note_shared_weights
from mimose.exceptions import LateChangeError, MimoseError, NotRecomputableError
from mimose.inputs.compiled import called_attribute
from mimose.inputs.describe import Mode
from mimose.inputs.families import digest, family_key
from mimose.inputs.patch import Patch
from mimose.inputs.shapes import argument_tensors, call_shape
from mimose.memory.marks import (
    Counted,
    Gauge,
    Reading,
    Trace,
    by_operators,
    by_saved,
)
from mimose.runtime.counting import RecomputationFlops
from mimose.runtime.inner_gradients import InnerGradients
from mimose.torch_private import (
    COMPILED_CALL,
    are_parametrizations_cached,
    is_dual_level_open,
    is_from_forbidden_hooks,
    may_push_saved_hooks,
    top_transform,
)
from mimose.types import (
    ANY_HEADROOM,
    MOST_CONTEXTS,
    NO_HEADROOM,
    NOTHING_FREE,
    Headroom,
    Headrooms,
    Measured,
    OnRecompute,
    Uncounted,
)

_log = logging.getLogger(__name__)

_EDITED = "its input is edited in place after it was read"
_EDITS_OBJECT = "a tensor of an object that it is handed is edited in place"
_FORBIDS = "it forbids hooks of saved tensors, as torch.func.grad does"
_MOST_SURROUNDED = 8
"""Calls of a layer that are kept for what is around them before it is kept for good:
then plans go by it."""
_OUTSIDE = 3
"""Calls a layer without the model before a word is said."""


FirstCallSeen: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], None]


class RunningStep(Protocol):
    """What the events need to know of the step they run in."""

    trace: Trace | None
    """Where a measured step writes; None in any other."""
    part: int
    """Which forward of its window it is."""
    calls_before: tuple[int, ...]
    """How often each unit was called in the window before; () for never."""
    uncounted: Uncounted | None
    """Recomputations whose FLOPs are to be counted; None: all of them."""
    is_whole: bool
    """Whether recomputations run to their end, since they do so on other ranks."""
    on_first_call: FirstCallSeen | None
    """Wants to know what the first unit is called with, before it runs; may change
    what the step does, by `EventRunner.plan`."""

    @property
    def knows_flops(self) -> bool:
        """Whether no recomputation's FLOPs are to be counted."""
        ...

    def action(self, index: int) -> str:
        """Return the action of the event at a position no plan speaks of."""
        ...

    def add_flops(self, flops: int) -> None:
        """Take in the FLOPs of a recomputation."""
        ...


class EventRunner:
    """Runs every event of the step that is set, and passes through when none is.

    Args:
        units: The units, by index.
        actions: Those in use, from the one that holds most to the one that holds least.
        learner: Learns FLOPs.
        device: The model's.
        root: The model.
        knowledge: What the units do to objects that they are handed.
        findings: Tells when something of the units is found out.
        answers: Tells what only an accelerator knows.
        objects: Those that the units hold.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        actions: Sequence[Action],
        learner: Learner,
        device: torch.device,
        root: nn.Module,
        knowledge: Knowledge,
        findings: Findings,
        answers: LateAnswers,
        objects: HeldObjects,
    ) -> None:
        self._objects = objects
        self.units = units
        self._note_objects()
        self._findings = findings
        self._plan: tuple[Sequence[tuple[str, ...]] | None, int] = None, -1
        """That is set, and the version of the findings it was set with."""
        self._actions = {action.spec.name: action for action in actions}
        self.first = actions[0].spec.name
        """The action of a call that nothing is done about."""
        self._least = actions[-1].spec.name
        self._recomputing = {a.spec.name for a in actions if a.spec.recomputes}
        self._on_host = {a.spec.name for a in actions if a.spec.needs_host}
        self._headrooms = NOTHING_FREE
        self.knowledge = knowledge
        self.answers = answers
        """What only an accelerator knows, to be read when the step has ended."""
        self.inputs: list[tuple[Unit, Marks]] = []
        """Of the running step's recomputed calls, as they were read."""
        self._impure: dict[Unit, str] = {}
        """Units that the running step was told of in their first call, and why."""
        self.inner = InnerGradients()
        self.lacks_gradients = False
        """Whether a call that was planned for ran without gradients."""
        self._device = device
        self.step: RunningStep | None = None
        self._mode = Mode("", ())
        self._known_modes: set[str] = set()
        self._n_unplanned = 0
        self._root = root
        self._structure = Structure(root)
        self._flops = RecomputationFlops(learner, device)
        self.on_compiled: Callable[[], object] = lambda: None
        """Called where a unit turns out to run compiled code."""
        self.counts_outside = True
        """Whether layers called without the model are counted: until it is called."""
        self._n_outside = 0
        self._compiled: list[tuple[Unit, Patch]] = []
        """Compiled units, which may be compiled anew."""

    def watch_compiled(self, unit: Unit, patch: Patch) -> None:
        """Look after a compiled unit, whose patch may be replaced."""
        self._compiled.append((unit, patch))

    def refuse_replaced(self) -> None:
        """Make sure that units compiled in place were not compiled anew.

        Raises:
            MimoseError: One was.
        """
        for unit, patch in self._compiled:
            if called_attribute(unit.module) != COMPILED_CALL:
                continue
            if vars(unit.module)[COMPILED_CALL] is not patch:
                msg = (
                    f"{unit.name} was compiled again after attach, and is not planned "
                    f"any more: detach, and attach again"
                )
                raise MimoseError(msg)

    def set_mode(self, mode: Mode) -> None:
        """Say what is trained now; in a new mode layers may change other things."""
        if mode is self._mode:
            return
        self._mode = mode
        self._findings.families = mode.unit_keys
        if mode.key not in self._known_modes:
            if len(self._known_modes) >= MOST_CONTEXTS:
                self._known_modes.clear()
            self._known_modes.add(mode.key)
            self.forget_changes()

    def renew(self) -> bool:
        """Note anew what the units consist of, if modules or buffers are others now.

        Returns:
            Whether the model consists of others.
        """
        if not self._structure.renew() and not any(
            [unit.guard.is_other for unit in self.units]
        ):
            return False
        for unit in self.units:
            unit.renew()
        note_shared_weights(self.units)
        self._note_objects()
        return True

    def _note_objects(self) -> None:
        self._objects.note(m for unit in self.units for m in unit.module.modules())

    def forget_changes(self) -> None:
        """Find out anew what the units change."""
        for unit in self.units:
            unit.forget()

    def called_outside(self, unit: Unit) -> None:
        """Say once that layers train and the model itself is never called."""
        if not (unit.module.training and torch.is_grad_enabled()):
            return
        self._n_outside += 1
        if self._n_outside < _OUTSIDE * len(self.units):
            return
        self.counts_outside = False
        _log.warning(
            "mimose: layers such as %s were called %d times in training, and the %s "
            "that the session is attached to never was in training mode: nothing is "
            "planned. Attach to the module that your loop calls",
            unit.name,
            self._n_outside,
            type(self._root).__name__,
        )

    def begin(
        self,
        step: RunningStep,
        plan: Sequence[tuple[str, ...]] | None,
        headrooms: Headrooms = NOTHING_FREE,
    ) -> None:
        """Set the running step.

        Args:
            step: The step.
            plan: By unit, the actions of its window's calls.
            headrooms: What that leaves free around calls.
        """
        self.counts_outside = False
        self._n_unplanned = 0
        self._objects.begin()
        self.inputs, self._impure = [], {}
        self.lacks_gradients = False
        self.step = step
        self.inner.begin(is_measured=step.trace is not None)
        self.plan(plan, headrooms)

    def plan(
        self,
        plan: Sequence[tuple[str, ...]] | None,
        headrooms: Headrooms = NOTHING_FREE,
    ) -> None:
        """Set, by unit, the actions of calls; none of the running step was made."""
        assert self.step is not None
        self._headrooms = headrooms
        before, version = self._plan
        if plan is before and version == self._findings.version:
            for unit in self.units:
                unit.calls = 0
        else:
            self._plan = plan, self._findings.version
            by_unit = [()] * len(self.units) if plan is None else plan
            for unit, actions in zip(self.units, by_unit, strict=True):
                unit.plan(actions, self.first)
        if self.inner.is_watching:
            self._plan = None, -1
            for unit in self.units:
                unit.n_straight = 0
        for unit, calls in zip(self.units, self.step.calls_before, strict=False):
            unit.calls = calls

    def end(self) -> None:
        """Pass through from now on."""
        self.step = None
        self.inner.end()
        self.inputs = []

    def forget_comparisons(self) -> None:
        """Take note that there will be no backward of the running forward."""
        for unit, _ in self.inputs:
            unit.is_compared = unit.is_proven

    def refuse_unrepeatable(self, changed: Mapping[object, str]) -> None:
        """Make sure, as the root is left, that what was recomputed may run again.

        Units that may not are kept from now on.

        Args:
            changed: What the forward has changed, as `Rollback.learn` tells.

        Raises:
            NotRecomputableError: Some of them were to be recomputed in this step.
            LateChangeError: It has changed an object that units hold as never before.
        """
        is_new = self._objects.begin_to_move() and self.inputs
        if is_new and not why_forward_waits(self._root, self.units):
            self._cut_off_inputs()
            raise LateChangeError(self.inputs[0][0].name, [])
        found = {}
        for unit, noted in self.inputs:
            if is_edited(noted):
                found[unit] = _EDITED
        if not (found or changed or self._impure or self.knowledge.edited):
            return
        if self.knowledge.edited:
            found.update({u: _EDITS_OBJECT for u in self.units if u.handed.has_edited})
        if changed:
            found.update({u: why for u in self.units if (why := u.impurity(changed))})
        recomputed = {unit for unit, _ in self.inputs}
        found = {u: w for u, w in found.items() if u in recomputed or not u.is_kept}
        for unit, why in found.items():
            if not unit.is_kept:  # a gradient taken meanwhile may have told
                unit.keep(why)
        found.update(self._impure)
        units = [unit for unit in found if unit in recomputed]
        if units:
            self._cut_off_inputs()
            names = {unit.index: unit.name for unit in units}
            raise NotRecomputableError(names, found[units[0]])

    def _cut_off_inputs(self) -> None:
        for _, noted in self.inputs:
            cut_off(noted)

    def run(
        self,
        unit: Unit,
        planned: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one event that is not simply kept.

        Args:
            unit: The unit.
            planned: Its action under the step's plan; None without one.
            args: What it is called with.
            kwargs: What it is called with by name.
        """
        if not self.inner.is_watching:
            return self._run(unit, planned, args, kwargs)
        output = None
        self.inner.enter()
        try:
            output = self._run(unit, planned, args, kwargs)
        finally:
            self.inner.leave(output)
        return output

    def _run(
        self,
        unit: Unit,
        planned: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        step = self.step
        assert step is not None
        if planned is not None and not torch.is_grad_enabled():
            self.lacks_gradients = True
        if step.trace is not None:
            return self._measure(step, step.trace, unit, planned, args, kwargs)
        name = planned or self._unplanned(step)
        call = UnitCall(unit, args, kwargs, self, is_whole=step.is_whole)
        if name == self.first:
            return self._actions[name].run(call, None)
        if not torch.is_grad_enabled():
            return call.forward()
        name = self._chosen(name, unit, args, kwargs)
        if name == self.first:
            return call.forward()
        if name in self._recomputing and not step.knows_flops:
            call = call._replace(on_recompute=self._counted(step, call))
        if name in self._on_host:
            call = call._replace(headroom=self._headroom(unit, planned))
        return self._act(name, call, None)

    def _act(self, name: str, call: UnitCall, probe: Probe | None) -> Any:
        """Run a call under an action.

        Raises:
            NotRecomputableError: The action's hooks are forbidden within the layer.
        """
        try:
            return self._actions[name].run(call, probe)
        except RuntimeError as error:
            if name == self.first or not is_from_forbidden_hooks(error):
                raise
            unit = call.unit
            unit.keep_alike(_FORBIDS)
            raise NotRecomputableError({unit.index: unit.name}, _FORBIDS) from error

    def _is_surrounded(self, unit: Unit) -> bool:
        """Whether this call is kept for what is around it, by no fault of the unit."""
        where = _surroundings(unit)
        if where:
            unit.n_surrounded += 1
            self._findings.note_call_kept(unit, where)
            if unit.n_surrounded > _MOST_SURROUNDED:
                unit.keep(f"most of its calls are {where}")
        return bool(where)

    def _headroom(self, unit: Unit, planned: str | None) -> Headroom:
        if planned is None:  # a baseline's, which knows no budget
            return ANY_HEADROOM
        return self._headrooms.get((unit.index, unit.calls - 1), NO_HEADROOM)

    def note_read(self, unit: Unit, noted: Marks) -> None:
        """Take note of the inputs of a call that will run again."""
        self.inputs.append((unit, noted))

    def note_compiled(self, call: UnitCall) -> None:
        """Take note that a call has shown that its unit runs compiled code."""
        unit = call.unit
        key = self._mode.unit_keys[unit.index]
        unit.found_flops = self._flops.of_compiled(unit, key, call.args, call.kwargs)
        unit.is_compiled = True
        self.on_compiled()

    def note_impure(self, unit: Unit, why: str) -> None:
        """Take note that a unit turned out one that may not run again."""
        self._impure[unit] = why

    def _unplanned(self, step: RunningStep) -> str:
        self._n_unplanned += 1
        return step.action(self._n_unplanned - 1)

    def _counted(self, step: RunningStep, call: UnitCall) -> OnRecompute | None:
        """Return what counts the FLOPs of a call's recomputation, if that is needed."""
        unit, args, kwargs = call.unit, call.args, call.kwargs
        key = self._mode.unit_keys[unit.index]
        if step.uncounted is None:
            return self._flops.unplanned(step.add_flops, unit, key, args, kwargs)
        known_as = step.uncounted.get((unit.index, unit.calls - 1))
        if known_as is None:
            return None
        return self._flops.counted(step.add_flops, known_as, unit, key, args, kwargs)

    def _chosen(
        self,
        name: str,
        unit: Unit,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str:
        """Return the action of a call, now that it is made, where and with what it is.

        What refuses a unit is not chosen for it again; the least stands in for it.
        """
        if unit.is_kept or self._is_surrounded(unit):
            return self.first
        if self.knowledge.edited and self.knowledge.cannot_be_copied(args, kwargs):
            unit.keep(_EDITS_OBJECT)
            return self.first
        is_excluded = name in unit.excluded
        why = "" if is_excluded else self._actions[name].refuses(unit)
        if not (why or is_excluded):
            return name
        if name == self._least:
            unit.keep(why)
            return self.first
        if not is_excluded:
            unit.exclude(name, why)
        return self._chosen(self._least, unit, args, kwargs)

    def _measure(
        self,
        step: RunningStep,
        trace: Trace,
        unit: Unit,
        planned: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = UnitCall(unit, args, kwargs, self)
        inputs = [tensor for _, tensor in argument_tensors(args, kwargs)]
        has_storages = top_transform() is None
        if not (has_storages and _makes_gradients(unit.module, inputs)):
            return call.forward()
        name = planned or self._least
        is_free = planned == self.first
        if name != self.first:
            name = self._chosen(name, unit, args, kwargs)
        shape = call_shape(args, kwargs)
        measured = Measured(
            name=f"{unit.name}#{unit.calls - 1}",
            unit=unit.index,
            call=unit.calls - 1,
            sizes=shape.sizes,
            action=name,
            part=step.part,
        )
        handed = handed_over(args, kwargs)
        if handed is not None:
            measured.input_bytes = float(handed.untyped_storage().nbytes())
        index = trace.enter(measured)
        # Where it is kept by choice, other steps have told what it holds.
        probe = None
        if not is_free:
            probe = Probe(trace, index, self._gauge(unit, args, kwargs), inputs)
        output = self._act(name, call, probe)
        ranks = trace.leave(index, inputs, output)
        alike = family_key(self._mode.unit_keys[unit.index], shape, self._device)
        measured.belong_to(digest((alike, ranks)))
        return output

    def _gauge(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Gauge:
        """Return what counts a call, by what is known of its unit when it runs."""
        key = self._mode.unit_keys[unit.index]
        unseen = self._flops.unseen(unit, key, args, kwargs)

        def run(
            forward: Callable[[], Any], given: Sequence[torch.Tensor]
        ) -> tuple[Any, Reading]:
            flops = unseen()
            if flops is None:
                return by_operators(self._teach)(forward, given)
            return by_saved(self._teach, self._root, flops)(forward, given)

        return run

    def _teach(self, counted: Counted) -> dict[str, float]:
        """Return what each action would hold of a call that was counted."""
        held = {
            name: action.held_bytes(counted) for name, action in self._actions.items()
        }
        return {name: n_bytes for name, n_bytes in held.items() if n_bytes is not None}


def _surroundings(unit: Unit) -> str:
    """Return where a call is made that cannot run again in its backward; "" if it can.

    What is around it has ended by then, or does not bear hooks of saved tensors.
    """
    if top_transform() is not None:
        return "inside a transform of torch.func"
    if not may_push_saved_hooks():
        return "where hooks of saved tensors are forbidden"
    if is_dual_level_open():
        return "inside a level of forward-mode differentiation"
    if are_parametrizations_cached() and any(
        map(parametrize.is_parametrized, unit.module.modules())
    ):
        return "inside parametrize.cached()"
    return ""


def _makes_gradients(module: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call takes part in the backward at all; else it is no event."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in inputs) or any(
        parameter.requires_grad for parameter in module.parameters()
    )
