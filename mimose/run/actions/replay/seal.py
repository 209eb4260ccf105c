"""What tells a storage that goes from one that is rebuilt to something else.

Whatever a recipe rests on was compared with what was there when it was made, to the
last bit. A forward may do something else later on that shows in no graph. So of each
storage that goes the sum of its words is held, and some elements, others in each call:
a change of any one element changes the sum, and another order shows in the elements.
Both are compared before any gradient is made of what was rebuilt.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from mimose.tensors import bits

_MOST = 64
_GOLDEN = 0.6180339887498949
_turn = itertools.count()
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Seal(NamedTuple):
    """A sum, and elements at steps that divide no row evenly."""

    total: Any
    """A number; on an accelerator a tensor of one."""
    values: torch.Tensor
    """Bits, as integers."""
    step: int
    start: int


def seal(tensor: torch.Tensor) -> Seal:
    """Return what a tensor's storage is known by.

    Args:
        tensor: Without a graph.
    """
    whole = _whole(tensor)
    step = max(1, len(whole) // _MOST - 1)
    while math.gcd(step, len(whole)) > 1 and step > 1:
        step -= 1
    n_taken = min(_MOST, len(whole))
    room = len(whole) - (n_taken - 1) * step
    start = int(next(_turn) * _GOLDEN % 1.0 * room) if n_taken else 0
    values = whole[start::step][:n_taken].clone()
    return Seal(_total(whole), values, step, start)


def is_broken(sealed: Seal, rebuilt: torch.Tensor) -> bool | torch.Tensor:
    """Whether a storage holds something else; on an accelerator a flag that is there.

    Args:
        sealed: Of what was let go.
        rebuilt: Lies in a storage of the same size.
    """
    whole = _whole(rebuilt)
    now = whole[sealed.start :: sealed.step][: len(sealed.values)]
    total = _total(whole)
    if whole.is_cpu:
        return bool(total != sealed.total) or not torch.equal(sealed.values, now)
    flag: torch.Tensor = (sealed.values != now).any() | (total != sealed.total)
    return flag


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return (n,) words of all the storage that a tensor lies in."""
    n_bytes = tensor.untyped_storage().nbytes()
    size = tensor.element_size()
    flat = bits(tensor.as_strided((n_bytes // size,), (1,), 0))
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    widest = next(width for width in _WORDS if n_bytes % width == 0)
    if widest >= flat.element_size():
        return flat.view(_WORDS[widest])
    return flat


def _total(words: torch.Tensor) -> Any:
    if words.is_cpu:  # whole words add up ten times as fast as narrower ones
        return int(np.add.reduce(words.numpy().view(_UNSIGNED[words.element_size()])))
    return words.sum()


_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
