"""Flags of the process that choose kernels: as in a forward, so in its recomputation.

Note: [What stands around a forward]
``with sdpa_kernel(...)`` around a forward is over when its backward comes, and another
attention kernel would save other tensors. So what chooses kernels is read as a call
enters, and set again for its recomputation where it is another by then: attention
kernels and their order, the default dtype, deterministic algorithms, precision.
Autocast is saved in the same way (`mimose.exact.autocast`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from mimose.torch_private import ATTENTION_FLAGS

Flags: TypeAlias = "list[Any]"


def _determinism() -> tuple[bool, bool]:
    is_on = torch.are_deterministic_algorithms_enabled()
    return is_on, torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _matmul_precision() -> str | None:
    """Return it; None where it was set in torch's newer way, which cannot be mixed."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    *ATTENTION_FLAGS,
    (torch.get_default_dtype, torch.set_default_dtype),
    (_determinism, _set_determinism),
    (_matmul_precision, _set_matmul_precision),
)
_READ = tuple(get for get, _ in _FLAGS)


def flags_now() -> Flags:
    """Return what the flags are."""
    return [read() for read in _READ]


@contextlib.contextmanager
def with_flags(before: Flags) -> Iterator[None]:
    """Set the flags for a while to what `flags_now` has returned."""
    now = flags_now()
    _set(before)
    try:
        yield
    finally:
        _set(now)


def _set(flags: Flags) -> None:
    for (read, put), value in zip(_FLAGS, flags, strict=True):
        if read() != value:
            put(value)
