"""Dropout's noise as bits: zeros, and one other number.

On a CPU dropout multiplies by a tensor of zeros and ``1 / (1 - p)``, as large as what
it drops from; on accelerators it saves a mask of bytes. Either takes a bit an element
to hold, and is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from mimose.actions.flags import pack_flags, unpack_flags
from mimose.tensors import bits

_SAMPLE = 256


class Noise(NamedTuple):
    """Noise, an eighth of a byte an element."""

    bits: torch.Tensor
    scale: float
    shape: torch.Size
    dtype: torch.dtype


def scale_of(tensor: torch.Tensor) -> float | None:
    """Return the number beside zero in what looks like noise; None if it does not."""
    is_mask = tensor.dtype == torch.bool
    if not ((is_mask or tensor.is_floating_point()) and tensor.is_contiguous()):
        return None
    if tensor.storage_offset() or tensor.numel() < _SAMPLE:
        return None
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return None
    if is_mask:
        return 1.0
    found = sorted(set(tensor.detach().reshape(-1)[:_SAMPLE].tolist()))
    if len(found) != 2 or found[0] != 0.0 or not math.isfinite(found[1]):
        return None
    return float(found[1])


def pack(tensor: torch.Tensor) -> Noise | torch.Tensor:
    """Return noise as bits; the tensor itself, if it is another this time.

    Args:
        tensor: Contiguous, of any shape.
    """
    scale = scale_of(tensor)
    if scale is None:
        return tensor
    if tensor.dtype == torch.bool:
        flags = tensor.reshape(-1)
        return Noise(pack_flags(flags), scale, tensor.shape, tensor.dtype)
    flat = bits(tensor).reshape(-1)
    number = bits(torch.tensor(scale, dtype=tensor.dtype)).item()
    # A third number, or minus zero, is not zero and not that number.
    if flat.is_cpu:  # NumPy compares ten times as fast there
        is_number = flat.numpy() == number
        if np.count_nonzero(is_number) != np.count_nonzero(flat.numpy()):
            return tensor
        packed = pack_flags(torch.from_numpy(is_number))
    else:
        flags = flat == number
        if bool((flags != (flat != 0)).any()):
            return tensor
        packed = pack_flags(flags)
    return Noise(packed, scale, tensor.shape, tensor.dtype)


def unpack(noise: Noise | torch.Tensor) -> torch.Tensor:
    """Return the noise that was packed."""
    if isinstance(noise, torch.Tensor):
        return noise
    n_elements = math.prod(noise.shape)
    is_there = unpack_flags(noise.bits, n_elements)
    if noise.dtype == torch.bool:
        # A storage of its own: there may be more flags than elements in that one.
        return is_there.clone().view(noise.shape)
    return is_there.to(noise.dtype).mul_(noise.scale).view(noise.shape)


def held_bytes(noise: Noise | torch.Tensor) -> int:
    """Return what is held of packed noise."""
    tensor = noise if isinstance(noise, torch.Tensor) else noise.bits
    return tensor.untyped_storage().nbytes()
