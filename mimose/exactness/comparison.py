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
from typing import Any, TypeAlias

import torch

from mimose.exactness.layer import Layer
from mimose.model.compiled import SCRIPTED, code_in_graph
from mimose.tensors import is_plain, tensors_in, words_of
from mimose.torch_private import next_sequence_number
from mimose.types import OnRecompute

_GROUPS = 16
"""Number of sums of a tensor's words, held until the backward. If words within one
group change places, that is not noticed."""


_Fingerprint: TypeAlias = "list[tuple[torch.Size, torch.Tensor]]"
"""The shape and checksums of each tensor of an output."""


def _fingerprint(output: Any) -> _Fingerprint | None:
    """Return the fingerprint of an output; None if it cannot be read."""
    tensors = list(tensors_in(output))
    if not all(map(is_plain, tensors)):
        return None
    return [(tensor.shape, _sums(tensor.detach())) for tensor in tensors]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's words in a few groups, because one sum ignores their order.

    Words that fill no group follow as they are.
    """
    words, rest = words_of(tensor, _GROUPS)
    sums = words.view(_GROUPS, len(words) // _GROUPS).sum(1)
    return torch.cat((sums, rest)) if len(rest) else sums


def _differences(one: _Fingerprint, other: _Fingerprint) -> list[torch.Tensor]:
    """Return flags; one is true if two fingerprints differ."""
    kinds = [[(shape, sums.device) for shape, sums in own] for own in (one, other)]
    if kinds[0] != kinds[1]:
        return [torch.tensor(True)]
    pairs = zip(one, other, strict=True)
    return [(sums != others).any() for (_, sums), (_, others) in pairs]


class Comparison:
    """Compares one call of a layer with its recomputation.

    Args:
        layer: The layer. If `is_doubted` is set, its recomputation runs twice.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        # An extra run would wait for other ranks, which do not run it.
        self._runs_twice = layer.is_doubted and not layer.waits
        self._seen: _Fingerprint | None = None

    def take(self, output: Any) -> None:
        """Record what the forward returned."""
        self._seen = _fingerprint(output)

    def compared(self, on_recompute: OnRecompute | None) -> OnRecompute:
        """Return an `on_recompute` that also compares.

        Args:
            on_recompute: The one to wrap; None for none.
        """

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            seen = self._seen
            trial = _trial(forward) if seen is not None and self._runs_twice else None
            began = next_sequence_number()
            output = forward() if on_recompute is None else on_recompute(forward, given)
            if not self._layer.is_compiled and code_in_graph(output, began)[1]:
                self._layer.fail(SCRIPTED)
            again = None if seen is None else _fingerprint(output)
            if seen is None or again is None:  # they cannot be compared
                self._settle(is_other=False, is_unsteady=False, is_clear=True)
            else:
                self._ask(seen, trial, again)
            return output

        return run

    def _ask(
        self, seen: _Fingerprint, trial: _Fingerprint | None, again: _Fingerprint
    ) -> None:
        flags = _differences(seen, again)
        n_first = len(flags)
        is_on_cpu = all(sums.is_cpu for _, sums in again)
        if trial is not None:
            flags += _differences(trial, again)

        def on_flags_read(differ: Sequence[bool]) -> None:
            is_other, is_unsteady = any(differ[:n_first]), any(differ[n_first:])
            self._settle(is_other, is_unsteady, is_on_cpu or trial is not None)

        self._layer.findings.defer(flags, on_flags_read)

    def _settle(self, is_other: bool, is_unsteady: bool, is_clear: bool) -> None:
        """Decide what a difference means; it is clear on a CPU, or after a trial."""
        layer, was_doubted = self._layer, self._layer.is_doubted
        layer.is_doubted = is_other and not is_clear and not layer.waits
        is_unknown = is_other and not is_clear and layer.waits
        layer.is_compared = not is_other or is_unsteady or is_unknown
        why = ""
        if is_unsteady:
            why = (
                "two recomputations from the same state differ, because its kernels "
                "are not deterministic on this device (see "
                "torch.use_deterministic_algorithms)"
            )
        elif is_unknown:
            why = (
                "its recomputation differed from its forward; the reason is not known, "
                "because a second run would need all ranks"
            )
        elif is_other and is_clear:
            layer.keep(
                "a second run with the same input returned something else; until now "
                "its gradients were those of the second run"
            )
        elif was_doubted and not is_other:
            why = "one recomputation differed from its forward, and a later one did not"
        if why:
            layer.findings.note_inexact(layer.index, why)


def _trial(forward: Callable[[], Any]) -> _Fingerprint | None:
    """Recompute once more, without counting its saved tensors."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
        return _fingerprint(forward())
