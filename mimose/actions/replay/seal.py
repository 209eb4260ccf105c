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
from typing import NamedTuple

import torch

from mimose.tensors import bits, different_bits, sum_of_words

_MOST = 64
_GOLDEN = 0.6180339887498949
_turn = itertools.count()


class Seal(NamedTuple):
    """A sum, and elements at steps that divide no row evenly."""

    total: torch.Tensor
    """() of all words."""
    values: torch.Tensor
    """Bits, as integers."""
    step: int
    start: int

    @property
    def n_bytes(self) -> int:
        """What it takes itself."""
        return self.total.nbytes + self.values.nbytes


def seal(tensor: torch.Tensor) -> Seal:
    """Return what a tensor's storage is known by.

    Args:
        tensor: Without a graph.
    """
    whole = _whole(tensor)
    n_taken = min(_MOST, len(whole))
    step = max(1, len(whole) // _MOST - 1)
    while math.gcd(step, len(whole)) > 1:
        step -= 1
    room = len(whole) - (n_taken - 1) * step
    start = int(next(_turn) * _GOLDEN % 1.0 * room) if n_taken else 0
    values = whole[start::step][:n_taken].clone()
    return Seal(sum_of_words(whole), values, step, start)


def is_broken(sealed: Seal, rebuilt: torch.Tensor) -> bool | torch.Tensor:
    """Whether a storage holds something else; on an accelerator a flag that is there.

    Args:
        sealed: Of what was let go.
        rebuilt: Lies in a storage of the same size.
    """
    whole = _whole(rebuilt)
    now = whole[sealed.start :: sealed.step][: len(sealed.values)]
    is_other = different_bits(sealed.values, now)
    if is_other is True:
        return True
    return is_other | different_bits(sealed.total, sum_of_words(whole))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return (n,) the bits of all the storage that a tensor lies in."""
    n_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return bits(tensor.as_strided((n_elements,), (1,), 0)).flatten()
