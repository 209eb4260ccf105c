"""Flags of the process that choose kernels: as in a forward, so in its recomputation.

Note: [What stands around a forward]
``with sdpa_kernel(...)`` around a forward is over when its backward comes, and another
attention kernel would save other tensors. So what chooses kernels is read as a call
enters, and set again for its recomputation where it is another by then: attention
kernels and their order, the default dtype, deterministic algorithms, precision. So are
modes that see torch's functions, such as ``with torch.device(...)``. Autocast is saved
in the same way (`mimose.exactness.autocast`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from mimose.torch_private import (
    KERNEL_FLAGS,
    choose_attention,
    function_modes,
    matmul_precision,
    set_function_modes,
)

Flags: TypeAlias = "list[Any]"


_OPEN: Any = object()
"""In place of a flag that cannot be read; it is left as it is."""


def _set_precision(precision: Any) -> None:
    if precision is not _OPEN:
        torch.set_float32_matmul_precision(precision)


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (function_modes, set_function_modes),
    *KERNEL_FLAGS,
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_default_dtype, torch.set_default_dtype),
    # The last one: see `flags_now`.
    (matmul_precision, _set_precision),
)
_READ = tuple(get for get, _ in _FLAGS)


def flags_now() -> Flags:
    """Return what the flags are.

    Precision that was set in torch's newer way cannot be read in the older one.
    """
    try:
        return [read() for read in _READ]
    except RuntimeError:
        return [*(read() for read in _READ[:-1]), _OPEN]


def settle_flags(device: torch.device) -> None:
    """Have torch settle now what it sets itself at a process's first attention.

    On Hopper and Blackwell that puts cuDNN's kernels before flash attention's. A layer
    whose forward read the order before would be recomputed with other kernels.

    Args:
        device: Where attention will run.
    """
    if device.type == "cuda":
        choose_attention(torch.empty(1, 1, 1, 8, dtype=torch.half, device=device))


@contextlib.contextmanager
def with_flags(before: Flags) -> Iterator[None]:
    """Set the flags for a while to what `flags_now` has returned."""
    now = flags_now()
    _set(now, before)
    try:
        yield
    finally:
        _set(flags_now(), now)


def _set(now: Flags, flags: Flags) -> None:
    for (_, put), is_now, value in zip(_FLAGS, now, flags, strict=True):
        if is_now != value:
            put(value)
