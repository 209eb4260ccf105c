"""Comparing what a layer returned with what it returns when it is run again.

Note: [Run again]
A layer that reads what nobody saved for it (an object of its own, a global) returns
something else when it is run again. So its first output is compared with the first
recomputation's, to the bit. No forward is run for that; what it finds comes after the
step in which it happened, and is kept from the next on.

Note: [In any order]
An accelerator's kernels may add in any order, and so return other bits each time. There
a layer that differed is recomputed twice, the next time it is recomputed at all, from
the same state. Where both agree with each other and not with the forward, it reads what
nobody saved. Else its kernels are not deterministic: it is recomputed all the same, but
the report says that it is not exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mimose.tensors import bits, is_plain, tensors_in

_GROUPS = 16
"""Sums of a tensor's words, held until the backward: an exchange within one of them is
not seen."""


class Fingerprint(NamedTuple):
    """Numbers that differ where a bit of an output does, most likely."""

    kinds: list[tuple[torch.Size, torch.device]]
    sums: list[torch.Tensor]
    """Of each tensor's bits, on its device."""

    @property
    def is_on_cpu(self) -> bool:
        """Whether no accelerator had a part in it that shows."""
        return all(total.is_cpu for total in self.sums)


def fingerprint(output: Any) -> Fingerprint | None:
    """Return an output's fingerprint; None where nothing can be told.

    Args:
        output: What a layer returned.
    """
    tensors = list(tensors_in(output))
    if not all(map(is_plain, tensors)):
        return None
    with torch.no_grad():
        sums = [_sums(_words(tensor)) for tensor in tensors]
    return Fingerprint([(t.shape, t.device) for t in tensors], sums)


def differences(one: Fingerprint, other: Fingerprint) -> list[torch.Tensor]:
    """Return flags, of which one is true where two fingerprints differ."""
    if one.kinds != other.kinds:
        return [torch.tensor(True)]
    return [(a != b).any() for a, b in zip(one.sums, other.sums, strict=True)]


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Sum up words in a few groups: a sum of all is blind to their order."""
    if words.dim() > 1:
        return words.sum(dim=tuple(range(1, words.dim())), dtype=torch.int64)
    n_whole = words.numel() // _GROUPS * _GROUPS
    if words.dim() == 0 or not n_whole:
        return words
    groups = words[:n_whole].view(_GROUPS, -1).sum(1, dtype=torch.int64)
    return torch.cat((groups, words[n_whole:].sum(dtype=torch.int64).view(1)))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, of 64 bits if that takes no copy.

    The sum of smaller ones makes a copy in 64 bits first.
    """
    whole = bits(tensor)
    if whole.dim() == 0:
        return whole
    whole = whole.permute(sorted(range(whole.dim()), key=whole.stride, reverse=True))
    if not whole.is_contiguous() or (whole.numel() * whole.element_size()) % 8:
        return whole
    if (whole.storage_offset() * whole.element_size()) % 8:
        return whole
    return whole.view(-1).view(torch.int64)
