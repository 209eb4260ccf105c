"""Reads a memory budget from text, numbers and shares."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from mimose.exceptions import BudgetError
from mimose.planners.problem import format_bytes as format_bytes

Budget: TypeAlias = float | str | None
"""A budget as a user writes it; None is all free memory."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_LEFT_BYTES, _LEFT_SHARE = 512 * 2**20, 0.03
"""What stays free on a device for libraries, whichever is more."""
_LEFT_TO_RANKS_BYTES = 2**30
"""What stays free in addition if ranks communicate."""
_PATTERN = re.compile(r"\s*(\+?)\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-zA-Z]*)\s*")


def parse_budget(
    budget: float | str,
    device_bytes: int | None,
    held_bytes: Callable[[], int] | None = None,
) -> int:
    """Return a budget in bytes, at least 1.

    Args:
        budget: ``"6GiB"`` (2**30 bytes each), ``"6GB"`` (10**9), an integer number of
            bytes, ``"80%"`` or a float in (0, 1], a share of `device_bytes`, or
            ``"+400MiB"``, that much more than is held now. Text without a suffix is
            bytes.
        device_bytes: The memory of the device, for shares; None if not known.
        held_bytes: Reads what is held now; None if that cannot be read.

    Raises:
        BudgetError: The value has another type or an unknown suffix, is not positive,
            or refers to a number that is not known.
    """
    if isinstance(budget, str):
        return _parse_text(budget, device_bytes, held_bytes)
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool):
        return _positive(budget, budget)
    if isinstance(budget, (float, np.floating)):
        return _parse_fraction(budget, float(budget), device_bytes)
    msg = (
        f"budget must be a text such as '6GiB', a number of bytes, or a share of the "
        f"device's memory such as 0.8, got {budget!r} ({type(budget).__name__})"
    )
    raise BudgetError(msg)


def all_there_is(
    device: str, device_bytes: int | None, *, is_shared: bool, has_ranks: bool
) -> int:
    """Return the budget in bytes if the user gives none: all free memory, less some.

    Libraries need memory outside of the allocator: the context, cuBLAS, NCCL. If one of
    their calls finds none, its error does not mention memory.

    Args:
        device: The name of the device.
        device_bytes: Its free memory and what the process has reserved.
        is_shared: Whether other programs use the same memory, as on a CPU.
        has_ranks: Whether ranks communicate.

    Raises:
        BudgetError: The memory is shared, its size is not known, or too little is free.
    """
    if is_shared or device_bytes is None:
        there = "its size is not known"
        if device_bytes is not None:
            there = f"{format_bytes(device_bytes)} in all"
        msg = (
            f"a model on {device} needs a budget, because everything else on this "
            f"machine uses the same memory ({there}). Give one, such as '6GiB', or "
            f"'+2GiB' for 2 GiB more than is held now"
        )
        raise BudgetError(msg)
    left = left_free(device_bytes)
    if has_ranks:
        left += _LEFT_TO_RANKS_BYTES
    if left >= device_bytes:
        msg = (
            f"this process can have {format_bytes(device_bytes)} on {device}, but "
            f"{format_bytes(left)} must stay free for libraries: free memory there "
            f"(another process may hold it), or give a budget"
        )
        raise BudgetError(msg)
    return int(device_bytes - left)


def left_free(device_bytes: int) -> float:
    """Return what stays free on a device for libraries, in bytes.

    Args:
        device_bytes: Its free memory and what the process has reserved.
    """
    return max(_LEFT_BYTES, _LEFT_SHARE * device_bytes)


def rank_share(n_bytes: int | None) -> int | None:
    """Return one rank's part of memory that all ranks on a host share.

    Args:
        n_bytes: The memory; None if not known.
    """
    if n_bytes is None:
        return None
    return n_bytes // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _parse_text(
    text: str, device_bytes: int | None, held_bytes: Callable[[], int] | None
) -> int:
    match = _PATTERN.fullmatch(text)
    sign, number, unit = match.groups() if match is not None else ("", "0", "?")
    if unit == "%" and not sign:
        return _parse_fraction(text, float(number) / 100, device_bytes)
    factor = _UNITS.get(unit.upper())
    if factor is None:
        near, meant = f"{unit.upper()}iB", ""
        if near.upper() in _UNITS:
            meant = f" (did you mean '{sign}{number}{near}'?)"
        msg = (
            f"budget {text!r} is not a size{meant}: write a number with one of B, KB, "
            f"MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such "
            f"as '6GiB'; or '+6GiB' for that much more than is held now; or '80%' of "
            f"the device's memory"
        )
        raise BudgetError(msg)
    n_bytes = float(number) * factor
    if not sign:
        return _positive(text, n_bytes)
    if held_bytes is None:
        msg = (
            f"budget {text!r} is relative to what is held now, which cannot be read "
            f"here: give an absolute budget, such as '6GiB'"
        )
        raise BudgetError(msg)
    return _positive(text, n_bytes) + held_bytes()


def _parse_fraction(budget: object, fraction: float, device_bytes: int | None) -> int:
    if not 0.0 < fraction <= 1.0:
        msg = (
            f"budget {budget!r} is a share of the device's memory, which must be above "
            f"0 and at most 1 (100%). For bytes, give an integer or a text ('6GiB')"
        )
        raise BudgetError(msg)
    if device_bytes is None:
        msg = (
            f"budget {budget!r} is a share, but the memory size of this device is not "
            f"known: give bytes as an integer or a text ('6GiB')"
        )
        raise BudgetError(msg)
    return _positive(budget, fraction * device_bytes)


def _positive(budget: object, n_bytes: float) -> int:
    if math.isnan(n_bytes) or n_bytes < 1:
        msg = f"budget {budget!r} comes to {n_bytes} bytes; it must be at least 1"
        raise BudgetError(msg)
    return int(n_bytes)
