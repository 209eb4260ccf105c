"""Holding on the host what a call saved and cannot rebuild cheaply."""

from __future__ import annotations

from typing import Any

from mimose.planners.actions import OFFLOAD
from mimose.run.actions.base import NO_MEANS, Means, Probe, UnitCall
from mimose.run.actions.offload.codec import OffloadCodec
from mimose.run.actions.packing.action import Packing
from mimose.run.actions.packing.base import Codec, SavedStorage
from mimose.run.actions.replay.book import Found
from mimose.run.actions.replay.unit_graph import Ran
from mimose.run.unit import Unit
from mimose.tensors import storages_in

ON_HOST = "the model is on the host, whose memory is its own"


class Offload(Packing):
    """Rebuilds what takes no product of matrices, and holds the rest on the host.

    Args:
        means: What the session gives it.
    """

    def __init__(self, means: Means = NO_MEANS) -> None:
        super().__init__(OFFLOAD, _codec, means)
        self._host = means.host
        self._is_put_off = False

    def anew(self, means: Means) -> Offload:
        """Return the same action, which knows no recipe yet."""
        return Offload(means)

    def refuses(self, unit: Unit) -> str:
        """Return why nothing of a call can be packed."""
        return ON_HOST if self._host is None else super().refuses(unit)

    def run(self, call: UnitCall, probe: Probe | None) -> Any:
        """Run the forward, and let go what can be rebuilt or held on the host."""
        self._is_put_off = False
        output = super().run(call, probe)
        if probe is not None and self._is_put_off:
            event = probe.trace.events[probe.index]
            event.keep(self._keep.spec.name)
            event.withdraw(self.spec.name)
        return output

    def _let_go(
        self, found: Found, ran: Ran, call: UnitCall, probe: Probe | None
    ) -> float:
        if self._host is None:
            return 0.0
        if probe is not None and not self._fits(self._host, ran, probe):
            self._is_put_off = True
            return 0.0
        self._host.begin_call(call.headroom)
        return super()._let_go(found, ran, call, probe)

    def _fits(self, host: OffloadCodec, ran: Ran, probe: Probe) -> bool:
        """Whether the host has room for all of a call, so that it shows what it takes.

        Under a plan there is; a call that is tried takes its chance.
        """
        given = sum(s.nbytes() for s in storages_in(list(ran.inputs)).values())
        return self._kept_bytes(probe) + given <= host.memory.free_bytes


class _Nowhere:
    """Takes nothing: there is no host apart from the device."""

    is_exact = True

    def takes(self, saved: SavedStorage) -> bool:
        """Return False."""
        del saved
        return False

    def pack(self, saved: SavedStorage) -> None:
        """Return None."""


def _codec(means: Means) -> Codec:
    return means.host or _Nowhere()
