"""Reading an accelerator's caching allocator: all its numbers in one nested reading.

Note: [Private statistics]
`torch.accelerator.memory_stats` flattens and sorts some 150 numbers: 136 µs a call, and
`memory_allocated` and its like call it for one number each. The nested dictionary that
it flattens comes from `mimose.torch_private.device_statistics` in 11 µs. Where that is
missing the public call is used.

Note: [Requested bytes]
`allocated_bytes` counts whole blocks: a block of a large segment is not split where no
more than 1 MiB would remain, and which block a tensor gets depends on the steps before.
One and the same step differs by up to 20 MiB so. `requested_bytes` is what was asked
for, and repeats to the byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mimose.torch_private import allocator_settings, device_statistics


class Usage(NamedTuple):
    """An allocator's state at one moment; peaks are those since the last reset."""

    requested_bytes: int
    """Asked for by tensors that live."""
    requested_peak_bytes: int
    allocated_bytes: int
    """Of the blocks that these live in."""
    allocated_peak_bytes: int
    reserved_bytes: int
    """Taken from the device: these blocks, and free ones kept for later."""
    reserved_peak_bytes: int
    gap_bytes: int
    """Of free blocks in segments that something else lives in."""
    n_retries: int
    """How often the allocator freed its cached blocks since nothing else would do."""
    n_ooms: int
    """Out-of-memory errors raised, caught or not."""


def read_usage(index: int) -> Usage:
    """Read a device's allocator: see Note: [Private statistics].

    Args:
        index: The device's.
    """
    stats = _read_nested(index)
    allocated = stats["allocated_bytes"]["all"]
    requested = stats.get("requested_bytes", {}).get("all", {})
    if not requested.get("peak"):  # cudaMallocAsync does not count them
        requested = allocated
    reserved = stats["reserved_bytes"]["all"]
    return Usage(
        requested["current"],
        requested["peak"],
        allocated["current"],
        allocated["peak"],
        reserved["current"],
        reserved["peak"],
        stats["inactive_split_bytes"]["all"]["current"],
        stats["num_alloc_retries"],
        stats["num_ooms"],
    )


def has_expandable_segments() -> bool:
    """Whether the allocator's segments grow, as far as its settings say."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    said = [os.environ.get(name, "") for name in names]
    text = ",".join([*said, allocator_settings()]).replace(" ", "").lower()
    return "expandable_segments:true" in text


def _nested_publicly(index: int) -> Mapping[str, Any]:
    """Put the public, flattened statistics back into their nested form."""
    nested: dict[str, Any] = {}
    for name, value in torch.accelerator.memory_stats(index).items():
        *path, last = name.split(".")
        there = nested
        for part in path:
            there = there.setdefault(part, {})
        there[last] = value
    return nested


_read_nested: Callable[[int], Mapping[str, Any]] = device_statistics or _nested_publicly
