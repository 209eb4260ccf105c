"""Holding on the host what a call saved and cannot rebuild cheaply."""

from __future__ import annotations

from typing import Any

from mimose.actions.base import NO_MEANS, Means, Probe, UnitCall
from mimose.actions.offload.host import HostMemory
from mimose.actions.packing.action import Packing
from mimose.actions.packing.base import Codec, SavedStorage
from mimose.actions.replay.book import Found
from mimose.actions.replay.unit_graph import Ran
from mimose.budget import format_bytes
from mimose.exactness.unit import Unit
from mimose.planners.actions import OFFLOAD
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
        self._share = 1.0
        """Of what a call keeps and is given, the most that was held on the host."""
        self._waiting: set[int] = set()
        """Units for whose calls there was no room when they were to be measured."""

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
        self._host.begin_call(call.headroom)
        if probe is None:
            return super()._let_go(found, ran, call, None)
        most = self._kept_bytes(probe) + _given_bytes(ran)
        if not self._may_try(self._host.memory, call.unit, self._share * most):
            self._is_put_off = True
            return 0.0
        before = self._host.memory.held_bytes
        freed = super()._let_go(found, ran, call, probe)
        taken = (self._host.memory.held_bytes - before) / most
        self._share = taken if self._share == 1.0 else max(self._share, taken)
        return freed

    def _may_try(self, memory: HostMemory, unit: Unit, needed: float) -> bool:
        """Whether the host has room for all of a call that is measured.

        Else it would be learned as one that leaves the rest on the device. Under a plan
        there is room; who is tried takes its chance, and who had none comes first.
        """
        if needed > memory.budget_bytes:
            why = (
                f"a call may hold {format_bytes(needed)} on the host, and host_budget "
                f"is {format_bytes(memory.budget_bytes)}"
            )
            unit.exclude(self.spec.name, why)
            return False
        others = 0 if unit.index in self._waiting else len(self._waiting)
        if (1 + others) * needed <= memory.free_bytes:
            self._waiting.discard(unit.index)
            return True
        if not others:
            self._waiting.add(unit.index)
        return False


def _given_bytes(ran: Ran) -> int:
    """Return the bytes of the storages that a call is given."""
    return sum(s.nbytes() for s in storages_in(list(ran.inputs)).values())


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
