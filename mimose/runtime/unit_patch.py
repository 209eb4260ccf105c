"""A unit's forward, taken over: an event of the running step, if there is one."""

from __future__ import annotations

from typing import Any

import torch

from mimose.exactness.unit import Unit
from mimose.inputs.patch import Patch, hidden, is_traced
from mimose.runtime.events import EventRunner


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
        unit.take_over(self.original)
        self._untraced = hidden(_call)
        if unit.is_compiled:
            runner.watch_compiled(unit, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit as the step says; most often it is kept."""
        if is_traced():  # by somebody who compiles it after attach
            return self._untraced(self, args, kwargs)
        runner = self._runner
        step = runner.step
        if step is None:
            if runner.counts_outside:
                runner.called_outside(self._unit)
            return self.original(*args, **kwargs)
        if step.on_first_call is not None:
            step.on_first_call(args, kwargs)
        unit = self._unit
        call = unit.calls
        unit.calls = call + 1
        is_straight = call < unit.n_straight and step.trace is None
        if is_straight and torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        action = unit.actions[call] if call < len(unit.actions) else None
        return runner.run(unit, action, args, kwargs)


def _call(patch: UnitPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return patch(*args, **kwargs)
