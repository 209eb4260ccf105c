"""A unit's forward, taken over: an event of the running step, if there is one."""

from __future__ import annotations

from typing import Any

import torch

from mimose.run.events import EventRunner
from mimose.run.unit import Unit
from mimose.watch.patch import Patch


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
        self._first = runner.first
        unit.take_over(self.original)
        disable: Any = torch.compiler.disable
        self._untraced = disable(_call)
        if unit.is_compiled:
            runner.watch_compiled(unit, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit as the step says; most often it is kept."""
        if torch.compiler.is_compiling():  # by somebody who compiles it after attach
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
        action = unit.actions[call] if call < len(unit.actions) else None
        if action == self._first and unit.is_known and step.trace is None:
            return self.original(*args, **kwargs)
        return runner.run(unit, action, args, kwargs)


def _call(patch: UnitPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return patch(*args, **kwargs)
