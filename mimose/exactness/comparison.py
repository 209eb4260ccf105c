"""Compares a call with its recomputation, and decides what a difference means.

Note: [Run again]
If a layer reads untracked state (an object that it owns, a global), its second run may
return something else. So its first output is compared with that of the first
recomputation, bit by bit. This needs no extra forward. The result is known after the
step; a layer that differs is kept from the next step on.

Note: [In any order]
Kernels of an accelerator may add in any order, so their bits may differ from run to
run. If a layer on an accelerator differed, its next recomputation runs twice, from the
same state. If the two runs agree with each other but not with the forward, the layer
reads untracked state. Otherwise its kernels are not deterministic: the layer is still
recomputed, but the report says that it is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mimose.exactness.layer import Layer
from mimose.inputs.compiled import SCRIPTED, code_in_graph
from mimose.tensors import bits, is_plain, tensors_in
from mimose.torch_private import next_sequence_number
from mimose.types import OnRecompute

_GROUPS = 16
"""Number of sums of a tensor's words, held until the backward. If words within one
group change places, that is not noticed."""


class Fingerprint(NamedTuple):
    """Checksums of an output's tensors."""

    kinds: list[tuple[torch.Size, torch.device]]
    sums: list[torch.Tensor]
    """Those of each tensor's bits, on its device."""

    @classmethod
    def of(cls, output: Any) -> Fingerprint | None:
        """Return the checksums of an output; None if it cannot be read."""
        tensors = list(tensors_in(output))
        if not all(map(is_plain, tensors)):
            return None
        with torch.no_grad():
            return cls(
                [(t.shape, t.device) for t in tensors], list(map(_sums, tensors))
            )

    @property
    def is_on_cpu(self) -> bool:
        """Whether all tensors are on the CPU."""
        return all(total.is_cpu for total in self.sums)

    def differences(self, other: Fingerprint) -> list[torch.Tensor]:
        """Return flags; one is true if the other fingerprint differs."""
        if self.kinds != other.kinds:
            return [torch.tensor(True)]
        pairs = zip(self.sums, other.sums, strict=True)
        return [(one != another).any() for one, another in pairs]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's words in a few groups, because one sum ignores their order.

    Words of 8 bytes are summed in place; torch would copy narrower ones.
    """
    flat = bits(tensor.contiguous()).flatten()
    size = flat.element_size()
    n_whole = flat.nbytes // (8 * _GROUPS) * (8 * _GROUPS) // size
    whole = flat[:n_whole]
    if whole.storage_offset() * size % 8:
        whole = whole.clone()
    groups = whole.view(torch.int64).view(_GROUPS, -1).sum(1)
    return torch.cat((groups, flat[n_whole:].sum(dtype=torch.int64).view(1)))


class Comparison:
    """Compares one call of a layer with its recomputation.

    Args:
        layer: The layer. If `is_doubted` is set, its recomputation runs twice.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        # An extra run would wait for other ranks, which do not run it.
        self._runs_twice = layer.is_doubted and not layer.waits
        self._seen: Fingerprint | None = None

    def take(self, output: Any) -> None:
        """Record what the forward returned."""
        self._seen = Fingerprint.of(output)

    def compared(self, on_recompute: OnRecompute | None) -> OnRecompute:
        """Return an `on_recompute` that also compares.

        Args:
            on_recompute: The one to wrap; None for none.
        """

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            seen = self._seen
            twice = seen is not None and self._runs_twice
            trial = _trial(forward) if twice else None
            began = next_sequence_number()
            output = forward() if on_recompute is None else on_recompute(forward, given)
            if not self._layer.is_compiled and code_in_graph(output, began)[1]:
                self._layer.fail(SCRIPTED)
            again = None if seen is None else Fingerprint.of(output)
            if seen is None or again is None:
                self._layer.note_compared(is_doubted=False)
            else:
                self._ask(seen, trial, again)
            return output

        return run

    def _ask(
        self, seen: Fingerprint, trial: Fingerprint | None, again: Fingerprint
    ) -> None:
        flags = seen.differences(again)
        n_first = len(flags)
        if trial is not None:
            flags += trial.differences(again)

        def tell(differ: Sequence[bool]) -> None:
            is_other = any(differ[:n_first])
            is_decided = trial is not None or again.is_on_cpu or self._layer.waits
            if is_other and not is_decided:
                self._layer.note_compared(is_doubted=True)
            else:
                self._settle(
                    is_other=is_other,
                    is_unsteady=any(differ[n_first:]),
                    may_be_unsteady=not (again.is_on_cpu or trial is not None),
                )

        self._layer.device_checks.defer(flags, tell)

    def _settle(
        self, *, is_other: bool, is_unsteady: bool, may_be_unsteady: bool
    ) -> None:
        layer = self._layer
        was_doubted, layer.is_doubted = layer.is_doubted, False
        layer.is_compared = not is_other or is_unsteady or may_be_unsteady
        if is_unsteady:
            layer.note_inexact(
                "two recomputations from the same state differ, because its kernels "
                "are not deterministic on this device (see "
                "torch.use_deterministic_algorithms)"
            )
        elif is_other and may_be_unsteady:
            layer.note_inexact(
                "its recomputation differed from its forward; the reason is not known, "
                "because a second run would need all ranks"
            )
        elif is_other:
            layer.keep(
                "a second run with the same input returned something else; until now "
                "its gradients were those of the second run"
            )
        elif was_doubted:
            layer.note_inexact(
                "one recomputation differed from its forward, and a later one did not"
            )


def _trial(forward: Callable[[], Any]) -> Fingerprint | None:
    """Recompute once more, without counting its saved tensors."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same):
        return Fingerprint.of(forward())


def _same(saved: torch.Tensor) -> torch.Tensor:
    return saved
