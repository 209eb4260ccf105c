"""Packing what a call saved, on top of rebuilding what is cheap to rebuild."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from mimose.actions.base import NO_MEANS, Means, Probe, UnitCall
from mimose.actions.lean import CallWatch, Lean
from mimose.actions.packing.base import Codec
from mimose.actions.packing.bits import Bits
from mimose.actions.packing.errors import GradientErrors, unbounded
from mimose.actions.packing.gradient_error import (
    BesideCodec,
    Trial,
    unrepeatable,
)
from mimose.actions.packing.stash import Stash, pack
from mimose.actions.replay.book import Found
from mimose.actions.replay.rebuild import drop
from mimose.actions.replay.unit_graph import Ran
from mimose.exactness.unit import Unit
from mimose.planners import ActionSpec
from mimose.torch_private import storage_key
from mimose.types import ANY_HEADROOM


class Packing(Lean):
    """Rebuilds what takes no product of matrices, and packs what is left.

    What activations, norms and dropout have saved is rebuilt, as under ``lean``, from
    what the codec gives back; so a lossy codec is closer to the true gradient and holds
    less than it would by itself.

    Args:
        spec: The action's.
        make_codec: Makes the codec, anew for each session.
        means: What the session gives it.
    """

    def __init__(
        self,
        spec: ActionSpec,
        make_codec: Callable[[Means], Codec],
        means: Means = NO_MEANS,
    ) -> None:
        super().__init__(spec)
        self._make_codec = make_codec
        self._codec = make_codec(means)
        self._bits = Bits()
        self._errors = GradientErrors(means.max_error)

    @property
    def gradient_errors(self) -> Mapping[str, float]:
        """By layer, the largest change of its gradient that was measured."""
        return dict(self._errors.found)

    def anew(self, means: Means) -> Packing:
        """Return the same action, which knows no recipe yet."""
        return Packing(self.spec, self._make_codec, means)

    def refuses(self, unit: Unit) -> str:
        """Return why nothing of a call can be packed."""
        why = super().refuses(unit)
        if why or self.spec.is_exact:
            return why
        return self._errors.cannot_be_bounded(unit)

    def _let_go(
        self, found: Found, ran: Ran, call: UnitCall, probe: Probe | None
    ) -> float:
        if found.is_put_off or not ran.outputs:
            return 0.0
        if self.spec.is_exact or not self._errors.is_due(
            call.unit, has_room=probe is not None or call.headroom == ANY_HEADROOM
        ):
            if probe is not None:
                probe.trace.mark("let_go", probe.index)
            return self._pack(self._codec, found, ran, call, probe)
        if why := unrepeatable(ran):
            self._refuse(unbounded(why), call, probe)
            return 0.0
        trial, both = Trial(ran), BesideCodec(self._codec)
        freed = self._pack(both, found, ran, call, probe)
        why = self._errors.refuse(call.unit, trial.error())
        both.settle(is_exact=bool(why))
        if why:
            self._refuse(why, call, probe)
        return freed

    def _refuse(self, why: str, call: UnitCall, probe: Probe | None) -> None:
        """Never run a layer so again; what this call saved stays."""
        call.unit.exclude(self.spec.name, why)
        if probe is not None:
            probe.trace.events[probe.index].keep(self._keep.spec.name)

    def _pack(
        self,
        codec: Codec,
        found: Found,
        ran: Ran,
        call: UnitCall,
        probe: Probe | None,
    ) -> float:
        recipe = found.recipe
        stash = pack(recipe, ran, self._bits, codec)
        freed = stash.freed_bytes
        if recipe is not None:
            freed += drop(
                recipe,
                ran,
                CallWatch(self.spec.name, call),
                inputs=stash.inputs,
                lent=stash.lent,
                inexact=stash.inexact,
                served=stash.served,
            )
        if probe is not None:
            self._tell(probe, stash, ran.inputs)
        return freed

    def _tell(self, probe: Probe, stash: Stash, inputs: Sequence[torch.Tensor]) -> None:
        event = probe.trace.events[probe.index]
        event.tell_packed(
            self.spec.name,
            host_bytes=stash.host_bytes,
            saved_output_bytes=stash.saved_output_bytes,
        )
        event.tell_outputs(self._keep.spec.name, stash.output_bytes)
        for storage in map(torch.Tensor.untyped_storage, inputs):
            if storage_key(storage) in stash.released:
                event.tell_released(storage.nbytes(), Gone(storage))
                break


class Gone:
    """Whether a storage has gone; does not hold it."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = weakref.ref(storage)

    def __call__(self) -> bool:
        """Return True once it has."""
        return self._reference() is None
