"""Reading a memory budget as people write it."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from mimose.exceptions import BudgetError

Budget: TypeAlias = float | str | None
"""A budget as people write it; None is all there is."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_LEFT_BYTES, _LEFT_SHARE = 512 * 2**20, 0.03
"""Of a device left to libraries, whichever is more, ..."""
_LEFT_TO_RANKS_BYTES = 2**30
"""... and so much more where ranks communicate."""
_LEAST_BARE = 2**20
"""A smaller text without a unit is more likely one of MiB or GiB."""
_PATTERN = re.compile(r"\s*(\+?)\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-zA-Z]*)\s*")


def parse_budget(
    budget: float | str,
    device_bytes: int | None,
    held_bytes: Callable[[], int] | None = None,
) -> int:
    """Turn a budget as people write it into bytes.

    Args:
        budget: ``"6GiB"`` (2**30 bytes each), ``"6GB"`` (10**9), an integer number
            of bytes, or ``"80%"`` or a float in (0, 1], a fraction of `device_bytes`.
            Text without a unit is bytes, and no less than 2**20 of them. ``"+400MiB"``
            is so much more than is held now.
        device_bytes: What the device has, for fractions; None if unknown.
        held_bytes: Reads what is held now; None where nothing can.

    Returns:
        The budget in bytes, at least 1.

    Raises:
        BudgetError: The value has another type, no known unit, is not positive, more
            than anything has, a fraction of an unknown total, or relative to what
            cannot be read.
    """
    if isinstance(budget, str):
        return _parse_text(budget, device_bytes, held_bytes)
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool):
        return _positive(budget, budget)
    if isinstance(budget, (float, np.floating)):
        return _parse_fraction(budget, float(budget), device_bytes)
    msg = (
        f"budget must be text such as '6GiB', a number of bytes or a fraction of the "
        f"device's memory such as 0.8, got {budget!r} ({type(budget).__name__})"
    )
    raise BudgetError(msg)


def all_there_is(
    device: str, device_bytes: int | None, *, is_shared: bool, has_ranks: bool
) -> int:
    """Return the budget of who names none: what is there for this process, less some.

    What the libraries take lies outside of the allocator: the context, cuBLAS, NCCL. A
    call of theirs that finds no memory fails with no out-of-memory error.

    Args:
        device: Its name.
        device_bytes: What is free there and what the process has reserved.
        is_shared: Whether all else that runs lives there, as on a CPU.
        has_ranks: Whether ranks communicate.

    Raises:
        BudgetError: It is a CPU, whose memory others need, too, or does not tell.
    """
    if is_shared or device_bytes is None:
        there = "its size is not known"
        if device_bytes is not None:
            there = f"{format_bytes(device_bytes)} in all"
        msg = (
            f"a model on {device} needs a budget: everything else on this machine uses "
            f"the same memory ({there}). Give one, such as '6GiB', or '+2GiB' for 2 "
            f"GiB more than is held now"
        )
        raise BudgetError(msg)
    left = max(_LEFT_BYTES, _LEFT_SHARE * device_bytes)
    if has_ranks:
        left += _LEFT_TO_RANKS_BYTES
    if left >= device_bytes:
        msg = (
            f"this process can have {format_bytes(device_bytes)} on {device}, and "
            f"{format_bytes(left)} must stay free for libraries: free memory there "
            f"(another process may hold it), or give a budget"
        )
        raise BudgetError(msg)
    return int(device_bytes - left)


def rank_share(n_bytes: int | None) -> int | None:
    """Return what one process has of memory that all ranks of a host take theirs from.

    Args:
        n_bytes: All of it; None if unknown.

    Raises:
        BudgetError: What says how many ranks there are is no number.
    """
    if n_bytes is None:
        return None
    n_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not n_ranks.isdecimal():
        msg = (
            f"the environment variable LOCAL_WORLD_SIZE, by which ranks share the "
            f"memory of their host, must be the number of ranks on this host, got "
            f"{n_ranks!r}: set it right, or unset it where there is one rank"
        )
        raise BudgetError(msg)
    return n_bytes // max(1, int(n_ranks))


def _parse_text(
    text: str, device_bytes: int | None, held_bytes: Callable[[], int] | None
) -> int:
    match = _PATTERN.fullmatch(text)
    sign, number, unit = match.groups() if match is not None else ("", "0", "?")
    if unit == "%" and not sign:
        return _parse_fraction(text, float(number) / 100, device_bytes)
    factor = _UNITS.get(unit.upper())
    if factor is None:
        msg = (
            f"budget {text!r} is not a size: write a number with one of B, KB, MB, GB, "
            f"TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), as in "
            f"'6GiB'; '+6GiB' for so much more than is held now, or '80%' of the "
            f"device's memory"
        )
        raise BudgetError(msg)
    n_bytes = float(number) * factor
    if not unit and n_bytes < _LEAST_BARE:
        own = text.strip()
        msg = (
            f"budget {text!r} has no unit, and so few bytes hold no step: write "
            f"'{own}GiB' or '{own}MiB', or '{own}B' if bytes are meant"
        )
        raise BudgetError(msg)
    if not sign:
        return _positive(text, n_bytes)
    if held_bytes is None:
        msg = (
            f"budget {text!r} is relative to what is held now, which cannot be read "
            f"here; give all of it, as in '6GiB'"
        )
        raise BudgetError(msg)
    return _positive(text, n_bytes) + held_bytes()


def _parse_fraction(budget: object, fraction: float, device_bytes: int | None) -> int:
    if not 0.0 < fraction <= 1.0:
        msg = (
            f"budget {budget!r} is a fraction of the device's memory, which must lie "
            f"in (0, 1], or above 0% and up to 100%; give bytes as an integer or as "
            f"text ('6GiB')"
        )
        raise BudgetError(msg)
    if device_bytes is None:
        msg = (
            f"budget {budget!r} is a fraction, but this device does not tell how "
            f"much memory it has; give bytes as an integer or as text ('6GiB')"
        )
        raise BudgetError(msg)
    return _positive(budget, fraction * device_bytes)


def _positive(budget: object, n_bytes: float) -> int:
    if n_bytes > sys.maxsize:
        msg = "budget is more than 2**63 bytes, which no device has"
        raise BudgetError(msg)
    if math.isnan(n_bytes) or n_bytes < 1:
        msg = f"budget {budget!r} comes to {n_bytes} bytes; it must be at least 1"
        raise BudgetError(msg)
    return int(n_bytes)


def format_bytes(n_bytes: float) -> str:
    """Write a number of bytes for people: GiB from one GiB up, else MiB.

    >>> format_bytes(1610612736), format_bytes(-52428800)
    ('1.50 GiB', '-50.0 MiB')
    """
    if abs(n_bytes) >= 2**30:
        return f"{n_bytes / 2**30:.2f} GiB"
    return f"{round(n_bytes / 2**20, 1) + 0.0:.1f} MiB"  # no minus before a 0
