"""Running the units' calls: kept, recomputed, or measured, as the step says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from mimose.actions import (
    OnRecompute,
    all_buffers,
    changing_buffers,
    recompute,
)
from mimose.collector import KEEP, RECOMPUTE, Measured, Trace, input_storages
from mimose.estimator import Estimator
from mimose.families import digest, family_key, module_key
from mimose.series import Sizes, Uncounted
from mimose.shapes import argument_tensors, call_shape
from mimose.surroundings import Surroundings
from mimose.tracker import StorageTracker
from mimose.units import Patch


class Unit:
    """A module planned for, and where its calls stand in the running step."""

    def __init__(self, index: int, name: str, module: nn.Module) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.buffers = all_buffers(module)
        """That a forward changes; all of them, until a first call has told."""
        self.knows_buffers = False
        self.actions: tuple[str, ...] = ()
        """Under the running step's plan, by call."""
        self.calls = 0
        self.forward: Callable[..., Any] = module.forward
        self.is_kept = False
        """Whether it turned out that it cannot be recomputed."""
        self.surroundings = Surroundings(name, module, lambda: self.on_recompute(self))
        self.on_recompute: Callable[[Unit], None] = _ignore
        """Called before it is recomputed."""

    def call(self, run: Callable[[], Any]) -> Any:
        """Run the unit, the first time noticing which buffers it changes."""
        if self.knows_buffers:
            return run()
        before = [_state(module._buffers[name]) for module, name in self.buffers]
        look = self.surroundings.look()
        result = run()
        after = self.surroundings.look(look.slots)
        self.surroundings.changes_itself = look.versions != after.versions
        changed = [
            buffer
            for buffer, state in zip(self.buffers, before, strict=True)
            if _state(buffer[0]._buffers[buffer[1]]) != state
        ]
        known = changing_buffers(self.module)
        self.buffers = known + [b for b in changed if b not in known]
        self.knows_buffers = True
        self.surroundings.leave_out(self.buffers)
        return result


def _ignore(_: Unit) -> None:
    pass


def _state(buffer: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (id(buffer), buffer._version)


class UnitPatch(Patch):
    """A unit's forward: an event of the running step, if there is one.

    Args:
        unit: The unit.
        runner: Knows the running step.
    """

    def __init__(self, unit: Unit, runner: EventRunner) -> None:
        super().__init__(unit.module)
        self._unit = unit
        self._runner = runner
        unit.forward = self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit as the step says; most often it is kept."""
        runner = self._runner
        step = runner.step
        if step is None:
            return self.original(*args, **kwargs)
        unit = self._unit
        call = unit.calls
        unit.calls = call + 1
        actions = unit.actions
        if call < len(actions) and step.trace is None:
            if actions[call] == KEEP:
                return self.original(*args, **kwargs)
            if step.knows_flops and unit.knows_buffers and not unit.is_kept:
                return recompute(
                    self.original,
                    args,
                    kwargs,
                    buffers=unit.buffers,
                    surroundings=unit.surroundings,
                )
        return runner.run(unit, call, args, kwargs)


class RunningStep(Protocol):
    """What the events need to know of the step they run in."""

    trace: Trace | None
    """Where a measured step writes; None in any other."""
    uncounted: Uncounted | None
    """Recomputations whose FLOPs are to be counted; None: all of them."""

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


class NotRecomputableError(RuntimeError):
    """A unit was found that must be kept; the forward has to be run again."""

    def __init__(self, unit: Unit, why: str) -> None:
        super().__init__(
            f"{unit.name} cannot be recomputed: {why}. It is kept from now on; run the "
            f"step again, with the batch as it was."
        )
        self.unit = unit
        self.why = why


class EventRunner:
    """Runs every event of the step that is set, and passes through when none is.

    Args:
        units: The units, by index.
        estimator: Numbers the families, learns FLOPs, knows what must be kept.
        device: The model's.
    """

    def __init__(
        self, units: Sequence[Unit], estimator: Estimator, device: torch.device
    ) -> None:
        self.units = units
        for unit in units:
            unit.on_recompute = self._note
        self._device = device
        self.step: RunningStep | None = None
        self.mode = 0
        """Numbers what is trained and in training mode (see `FactsReader.mode`)."""
        self._keys: dict[tuple[int, int], str] = {}
        """Of units, by mode and index."""
        self.last_recomputed: Unit | None = None
        self._estimator = estimator
        self._n_unplanned = 0

    def _module_key(self, unit: Unit) -> str:
        """Describe a unit as it was when it was first measured in the present mode."""
        found = self._keys.get((self.mode, unit.index))
        if found is None:
            found = self._keys[self.mode, unit.index] = module_key(unit.module)
        return found

    def _note(self, unit: Unit) -> None:
        self.last_recomputed = unit

    def begin(self, step: RunningStep, plan: Sequence[tuple[str, ...]] | None) -> None:
        """Set the running step and, by unit, the actions of its calls."""
        self._n_unplanned = 0
        if plan is None:
            for unit in self.units:
                unit.actions, unit.calls = (), 0
        else:
            for unit, actions in zip(self.units, plan, strict=True):
                unit.actions, unit.calls = actions, 0
        self.step = step

    def end(self) -> None:
        """Pass through from now on."""
        self.step = None

    def run(
        self, unit: Unit, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one event that is not simply kept."""
        step = self.step
        assert step is not None
        if step.trace is not None:
            return self._measure(step.trace, unit, call, args, kwargs)
        if call >= len(unit.actions) and self._other(step) == KEEP:
            return unit.forward(*args, **kwargs)
        return self._recompute(step, unit, call, args, kwargs)

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
        if unit.is_kept:
            return unit.forward(*args, **kwargs)
        on_recompute = None
        if step.uncounted is None:
            on_recompute = self._counted(step, None)
        elif (unit.index, call) in step.uncounted:
            on_recompute = self._counted(step, step.uncounted[unit.index, call])
        return unit.call(
            lambda: recompute(
                unit.forward,
                args,
                kwargs,
                buffers=unit.buffers,
                on_recompute=on_recompute,
                surroundings=unit.surroundings,
            )
        )

    def _counted(
        self, step: RunningStep, known_as: tuple[int, Sizes] | None
    ) -> OnRecompute:
        """Count a recomputation that stops early, where its FLOPs are not known.

        The early stop leaves out what comes after the last tensor that is needed, so
        these are not the forward's FLOPs.
        """

        def run(forward: Callable[[], Any], _: Sequence[torch.Tensor]) -> Any:
            tracker = StorageTracker()
            try:
                with tracker:
                    return forward()
            finally:
                step.add_flops(tracker.flops)
                if known_as is not None:
                    self._estimator.learn_flops(*known_as, tracker.flops)

        return run

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
        is_kept = is_planned or unit.is_kept
        key = family_key(self._module_key(unit), shape, self._device)
        measured = Measured(
            name=f"{unit.name}#{call}",
            unit=unit.index,
            call=call,
            sizes=shape.sizes,
            action=KEEP if is_kept else RECOMPUTE,
            inputs=input_storages(inputs),
        )
        index = trace.enter(measured)
        versions = [tensor._version for tensor in inputs]
        if is_planned:
            output = unit.forward(*args, **kwargs)
        elif is_kept:
            output = trace.kept(index, lambda: unit.forward(*args, **kwargs), inputs)
        else:
            output = unit.call(
                lambda: recompute(
                    unit.forward,
                    args,
                    kwargs,
                    buffers=unit.buffers,
                    on_recompute=trace.recomputed(index),
                    surroundings=unit.surroundings,
                    early_stop=False,
                )
            )
        ranks = trace.leave(index, inputs, output)
        measured.family = self._estimator.family(digest((key, ranks)))
        if not is_kept and versions != [tensor._version for tensor in inputs]:
            raise NotRecomputableError(unit, "it edits its own input in place")
        return output


def _makes_gradients(module: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call takes part in the backward at all; else it is no event."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in inputs) or any(
        parameter.requires_grad for parameter in module.parameters()
    )
