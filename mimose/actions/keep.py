"""Keeping a call's activations, as if nothing had been planned."""

from __future__ import annotations

from typing import Any

from mimose.actions.base import Probe, UnitCall
from mimose.exactness.first_call import FirstCall
from mimose.exactness.unit import Unit
from mimose.memory.marks import Counted
from mimose.planners.actions import KEEP


class Keep:
    """Holds all that autograd saves, from the forward to the backward."""

    spec = KEEP

    def refuses(self, unit: Unit) -> str:
        """Return "": what can run at all can be kept."""
        del unit
        return ""

    def run(self, call: UnitCall, probe: Probe | None) -> Any:
        """Run the forward; a first call tells what it changes."""
        unit = call.unit
        if probe is not None:
            return probe.trace.kept(
                probe.index, call.forward, probe.inputs, probe.gauge
            )
        if unit.is_known or unit.is_kept:
            return call.forward()
        first = FirstCall(unit.module)
        unit.guard.begin_anew()
        output = call.forward()
        why = unit.learn(first, call.notes.answers)
        if why:
            unit.keep(why)
        return output

    def held_bytes(self, counted: Counted) -> float:
        """Return all that the call made and that lives."""
        return counted.live_bytes
