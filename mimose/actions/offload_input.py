"""Running a call's forward again in backward, from an input that waits on the host."""

from __future__ import annotations

from mimose.actions.base import NO_MEANS, Means, Probe, UnitCall
from mimose.actions.offload.action import ON_HOST
from mimose.actions.offload.away import AwayInput, handed_over, to_pack
from mimose.actions.packing.action import Gone
from mimose.actions.recompute import Recompute
from mimose.exactness.unit import Unit
from mimose.planners.actions import OFFLOAD_INPUT


class OffloadInput(Recompute):
    """Holds a call's outputs, and its input on the host.

    The copy is made as the call begins, beside whose forward it can go on.

    Args:
        means: What the session gives it.
    """

    spec = OFFLOAD_INPUT

    def __init__(self, means: Means = NO_MEANS) -> None:
        self._host = means.host

    def anew(self, means: Means) -> OffloadInput:
        """Return the same action, for a session that gives it other means."""
        return OffloadInput(means)

    def refuses(self, unit: Unit) -> str:
        """Return why a call cannot run again, where that shows before it runs."""
        return ON_HOST if self._host is None else super().refuses(unit)

    def _send_away(self, call: UnitCall, probe: Probe | None) -> AwayInput | None:
        handed = handed_over(call.args, call.kwargs)
        saved = None if handed is None else to_pack(handed)
        if self._host is None or handed is None or saved is None:
            return None
        if not self._host.takes(saved):
            return None
        self._host.begin_call(call.headroom)
        packed = self._host.pack(saved)
        if packed is None:
            return None
        away = AwayInput(handed, packed)
        if probe is not None:
            event = probe.trace.events[probe.index]
            event.tell_packed(
                self.spec.name, host_bytes=away.host_bytes, saved_output_bytes=0.0
            )
            event.tell_released(away.n_bytes, Gone(handed.untyped_storage()))
        return away
