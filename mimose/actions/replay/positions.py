"""Where a pool found its largest elements, in as few bytes as a plane needs.

Torch saves 8 bytes for each position; a plane of less than 2 ** 15 elements takes two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Positions(NamedTuple):
    """Positions within planes."""

    values: torch.Tensor
    """Integers of 16 or 32 bits, or as they were."""


def pack(tensor: torch.Tensor, plane: int) -> Positions:
    """Return positions in as few bytes as tell them.

    Args:
        tensor: Positions, none negative.
        plane: More than the largest.
    """
    for dtype in (torch.int16, torch.int32):
        if plane <= torch.iinfo(dtype).max:
            return Positions(tensor.to(dtype))
    return Positions(tensor)


def unpack(packed: Positions) -> torch.Tensor:
    """Return positions as torch has them."""
    return packed.values.to(torch.int64)
