"""Packs flags into bits."""

from __future__ import annotations

import numpy as np
import torch

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    """Return (ceil(n / 8),) bytes that hold flags, the first in the lowest bit.

    Args:
        flags: (n,) truth values, on any device; packed there.
    """
    if flags.is_cpu:  # NumPy is ten times as fast there
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    short = -flags.numel() % 8
    rows = torch.nn.functional.pad(flags, (0, short)).view(-1, 8)
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=flags.device)
    return (rows * weights).sum(1, dtype=torch.uint8)


def unpack_flags(packed: torch.Tensor, n_flags: int) -> torch.Tensor:
    """Return (n,) the flags that were packed, in a storage that may be larger.

    Args:
        packed: What `pack_flags` returned.
        n_flags: Number of flags.
    """
    if packed.is_cpu:
        found = np.unpackbits(packed.numpy(), count=n_flags, bitorder="little")
        return torch.from_numpy(found).view(torch.bool)
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=packed.device)
    flags = packed.unsqueeze(1).bitwise_and(weights) != 0
    return flags.view(-1)[:n_flags]
