"""Running the units' calls: kept, recomputed, or measured, as the step says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from mimose.exact.changes import Before
from mimose.exact.first_call import FirstCall
from mimose.exact.handed import HandedObjects, Knowledge
from mimose.exact.input_watch import Marks, cut_off, is_edited, marks
from mimose.exact.late_answers import LateAnswers
from mimose.exact.named_errors import is_inside_checkpoint
from mimose.exceptions import MimoseError, NotRecomputableError
from mimose.learn.learner import Learner
from mimose.measure.gauges import Gauge, by_operators, by_saved
from mimose.measure.trace import Trace, input_storages
from mimose.run.actions import recompute
from mimose.run.comparison import Comparison
from mimose.run.counting import RecomputationFlops
from mimose.run.findings import Findings
from mimose.run.unit import Unit
from mimose.torch_private import COMPILED_CALL
from mimose.types import (
    KEEP,
    MOST_CONTEXTS,
    RECOMPUTE,
    Measured,
    OnRecompute,
    Uncounted,
)
from mimose.watch.compiled import called_attribute
from mimose.watch.describe import Mode
from mimose.watch.families import digest, family_key
from mimose.watch.patch import Patch
from mimose.watch.shapes import argument_tensors, call_shape

_log = logging.getLogger(__name__)

_EDITS_OBJECT = "a tensor of an object that it is handed is edited in place"
_OUTSIDE = 3
"""Calls a layer without the model before a word is said."""


class UnitPatch(Patch):
    """A unit's forward: an event of the running step, if there is one.

    Args:
        unit: The unit.
        runner: Knows the running step.
    """

    def __init__(self, unit: Unit, runner: EventRunner) -> None:
        super().__init__(unit.module)
        self.unit = unit
        self._runner = runner
        unit.forward = self.original
        disable: Any = torch.compiler.disable
        self._untraced = disable(_call)
        if unit.is_compiled:
            runner.patches.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit as the step says; most often it is kept."""
        if torch.compiler.is_compiling():  # by somebody who compiles it after attach
            return self._untraced(self, args, kwargs)
        runner = self._runner
        step = runner.step
        if step is None:
            if runner.counts_outside:
                runner.called_outside(self.unit)
            return self.original(*args, **kwargs)
        if step.on_first_call is not None:
            step.on_first_call(args, kwargs)
        unit = self.unit
        call = unit.calls
        unit.calls = call + 1
        actions = unit.actions
        if call < len(actions) and step.trace is None:
            if actions[call] == KEEP:
                if unit.is_known or unit.is_kept:
                    return self.original(*args, **kwargs)
                return runner.keep(unit, args, kwargs)
            if step.knows_flops and unit.is_compared and not unit.is_kept:
                runner.inputs.append((unit, marks(args, kwargs)))
                return recompute(
                    self.original,
                    args,
                    kwargs,
                    before=Before(unit.slots) if unit.slots else None,
                    surroundings=unit.surroundings,
                    devices=unit.devices,
                    handed=unit.handed,
                    early_stop=not unit.is_compiled,
                )
        return runner.run(unit, call, args, kwargs)

    @property
    def is_replaced(self) -> bool:
        """Whether the unit was compiled in place anew, so that this is not called."""
        return called_attribute(self._module) == COMPILED_CALL and (
            vars(self._module)[COMPILED_CALL] is not self
        )


def _call(patch: UnitPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return patch(*args, **kwargs)


FirstCallSeen: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], None]


class RunningStep(Protocol):
    """What the events need to know of the step they run in."""

    trace: Trace | None
    """Where a measured step writes; None in any other."""
    uncounted: Uncounted | None
    """Recomputations whose FLOPs are to be counted; None: all of them."""
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
        learner: Learns FLOPs.
        device: The model's.
        root: The model.
        findings: Takes note of units that have to be kept.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        learner: Learner,
        device: torch.device,
        root: nn.Module,
        findings: Findings,
    ) -> None:
        self.units = units
        self._findings = findings
        self.knowledge = Knowledge()
        """What the units do to objects that they are handed."""
        for unit in units:
            unit.handed = HandedObjects(self.knowledge)
            unit.on_recompute = self._note
            unit.on_failure = self._note_failure
        self.answers = LateAnswers()
        """What only an accelerator knows, to be read when the step has ended."""
        self.inputs: list[tuple[Unit, Marks]] = []
        """Of the running step's recomputed calls, as they were read."""
        self._device = device
        self.step: RunningStep | None = None
        self._mode = Mode("", ())
        self._known_modes: set[str] = set()
        self.last_recomputed: Unit | None = None
        self._n_unplanned = 0
        self._root = root
        self._flops = RecomputationFlops(learner, device, findings)
        self.counts_outside = True
        """Whether layers called without the model are counted: until it is called."""
        self._n_outside = 0
        self.patches: list[UnitPatch] = []
        """Those of compiled units tell when they are replaced."""

    def refuse_replaced(self) -> None:
        """Make sure that units compiled in place were not compiled anew.

        Raises:
            MimoseError: One was.
        """
        for patch in self.patches:
            if patch.is_replaced:
                msg = (
                    f"{patch.unit.name} was compiled again after attach, and is not "
                    f"planned any more: detach, and attach again"
                )
                raise MimoseError(msg)

    def set_mode(self, mode: Mode) -> None:
        """Say what is trained now; in a new mode layers may change other things."""
        if mode is self._mode:
            return
        self._mode = mode
        if mode.key not in self._known_modes:
            if len(self._known_modes) >= MOST_CONTEXTS:
                self._known_modes.clear()
            self._known_modes.add(mode.key)
            self.forget_changes()

    def forget_changes(self) -> None:
        """Find out anew what the units change."""
        for unit in self.units:
            unit.forget()

    def _note(self, unit: Unit) -> None:
        self.last_recomputed = unit

    def _note_failure(self, unit: Unit, why: str) -> None:
        self.last_recomputed = unit
        self._findings.keep(unit, why)

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

    def begin(self, step: RunningStep, plan: Sequence[tuple[str, ...]] | None) -> None:
        """Set the running step and, by unit, the actions of its calls."""
        self.counts_outside = False
        self._n_unplanned = 0
        self.inputs = []
        self.plan(plan)
        self.step = step

    def plan(self, plan: Sequence[tuple[str, ...]] | None) -> None:
        """Set, by unit, the actions of the calls to come, none of which was made."""
        if plan is None:
            for unit in self.units:
                unit.actions, unit.calls = (), 0
        else:
            for unit, actions in zip(self.units, plan, strict=True):
                unit.actions, unit.calls = actions, 0

    def end(self) -> None:
        """Pass through from now on."""
        self.step = None
        self.inputs = []

    def refuse_edited_inputs(self) -> None:
        """Make sure, as the root is left, that what was read is as it was.

        Raises:
            NotRecomputableError: Inputs of recomputed units were edited in place.
        """
        editors = {
            unit.index: unit.name
            for unit in self.units
            if unit.handed.has_edited and not unit.is_kept
        }
        if editors:
            raise NotRecomputableError(editors, _EDITS_OBJECT)
        edited = {u.index: u.name for u, noted in self.inputs if is_edited(noted)}
        if edited:
            for _, noted in self.inputs:
                cut_off(noted)
            why = "its input is edited in place after it was read"
            raise NotRecomputableError(edited, why)

    def run(
        self, unit: Unit, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one event that is not simply kept."""
        step = self.step
        assert step is not None
        if step.trace is not None:
            return self._measure(step.trace, unit, call, args, kwargs)
        if call >= len(unit.actions) and self._other(step) == KEEP:
            return self.keep(unit, args, kwargs)
        return self._recompute(step, unit, call, args, kwargs)

    def keep(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is kept; a first one tells what it changes."""
        if unit.is_known or unit.is_kept:
            return unit.forward(*args, **kwargs)
        first, around = FirstCall(unit.module), unit.surroundings
        around.begin_anew()
        versions = around.look().versions
        output = unit.forward(*args, **kwargs)
        unit.learn(first, (versions, around.look().versions), self.answers)
        return output

    def _other(self, step: RunningStep) -> str:
        self._n_unplanned += 1
        return step.action(self._n_unplanned - 1)

    def _recompute(
        self,
        step: RunningStep,
        unit: Unit,
        call: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._must_keep(unit, args, kwargs) or not torch.is_grad_enabled():
            return unit.forward(*args, **kwargs)
        on_recompute = None
        if step.uncounted is None:
            key = self._mode.unit_keys[unit.index]
            on_recompute = self._flops.unplanned(
                step.add_flops, unit, key, args, kwargs
            )
        elif (unit.index, call) in step.uncounted:
            key = self._mode.unit_keys[unit.index]
            known_as = step.uncounted[unit.index, call]
            on_recompute = self._flops.counted(
                step.add_flops, known_as, unit, key, args, kwargs
            )
        if unit.is_kept:
            return unit.forward(*args, **kwargs)
        return self._run(unit, args, kwargs, on_recompute)

    def _must_keep(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a unit is kept, now that it is called, where and with what it is."""
        if not unit.is_kept and self.knowledge.cannot_be_copied(args, kwargs):
            self._findings.keep(unit, _EDITS_OBJECT)
        if not unit.is_kept and not unit.is_compared and is_inside_checkpoint():
            self._findings.keep(unit, "the model itself checkpoints it")
        return unit.is_kept

    def _run(
        self,
        unit: Unit,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_recompute: OnRecompute | None,
        *,
        early_stop: bool = True,
    ) -> Any:
        """Run a call that is recomputed; a first one tells what it changes."""
        noted = marks(args, kwargs)
        around = unit.surroundings
        first, before, versions = None, None, [0]
        comparison = None
        if not unit.is_compared:
            comparison = Comparison(unit, self.answers, self._findings)
            on_recompute = comparison.compared(on_recompute)
        if not unit.is_known:
            first = FirstCall(unit.module)
            before = first.before
            around.begin_anew()
            versions = around.look().versions
        elif unit.slots:
            before = Before(unit.slots)
        output = recompute(
            unit.forward,
            args,
            kwargs,
            before=before,
            on_recompute=on_recompute,
            surroundings=around,
            devices=unit.devices,
            handed=unit.handed,
            early_stop=early_stop and comparison is None and not unit.is_compiled,
        )
        if is_edited(noted):
            cut_off(noted)
            why = "it edits its own input in place"
            raise NotRecomputableError({unit.index: unit.name}, why)
        self.inputs.append((unit, noted))
        if first is not None:
            unit.learn(first, (versions, around.look().versions), self.answers)
        unit.is_compared = not unit.is_doubted
        if comparison is not None and not around.changes_itself:
            comparison.take(output)
        return output

    def _measure(
        self,
        trace: Trace,
        unit: Unit,
        call: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        inputs = [tensor for _, tensor in argument_tensors(args, kwargs)]
        if not _makes_gradients(unit.module, inputs):
            return unit.forward(*args, **kwargs)
        shape = call_shape(args, kwargs)
        is_planned = call < len(unit.actions) and unit.actions[call] == KEEP
        gauge: Gauge = by_operators
        if unit.is_compiled and not is_planned:
            unit_key = self._mode.unit_keys[unit.index]
            flops = self._flops.of_compiled(unit, unit_key, args, kwargs)
            gauge = by_saved(self._root, flops)
        is_kept = is_planned or self._must_keep(unit, args, kwargs)
        key = family_key(self._mode.unit_keys[unit.index], shape, self._device)
        measured = Measured(
            name=f"{unit.name}#{call}",
            unit=unit.index,
            call=call,
            sizes=shape.sizes,
            action=KEEP if is_kept else RECOMPUTE,
            inputs=input_storages(inputs),
        )
        index = trace.enter(measured)
        if is_planned:
            output = unit.forward(*args, **kwargs)
        elif is_kept:
            output = trace.kept(
                index, lambda: unit.forward(*args, **kwargs), inputs, gauge
            )
        else:
            on_recompute = trace.recomputed(index, gauge)
            output = self._run(unit, args, kwargs, on_recompute, early_stop=False)
        ranks = trace.leave(index, inputs, output)
        measured.family = digest((key, ranks))
        return output


def _makes_gradients(module: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call takes part in the backward at all; else it is no event."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in inputs) or any(
        parameter.requires_grad for parameter in module.parameters()
    )
