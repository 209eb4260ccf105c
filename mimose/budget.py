"""Reading a memory budget as people write it."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable

import numpy as np

from mimose.exceptions import BudgetError

_log = logging.getLogger(__name__)

_UNITS = {
    "": 1,
    "B": 1,
    **{
        prefix + "B": 1000**power
        for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
    },
    **{
        prefix + "IB": 1024**power
        for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
    },
}
_LEFT_BYTES, _LEFT_SHARE = 512 * 2**20, 0.03
"""Of a device left to libraries, whichever is more, ..."""
_LEFT_TO_RANKS_BYTES = 2**30
"""... and so much more where ranks communicate."""
_LEAST_BARE = 2**20
"""A smaller number without a unit is more likely one of MiB or GiB."""
_MOST = 2**63
_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_PATTERN = re.compile(rf"\s*(\+?)\s*{_NUMBER}\s*([a-zA-Z]*)\s*")
_PERCENT = re.compile(rf"\s*{_NUMBER}\s*%\s*")


def parse_budget(
    budget: float | str,
    device_bytes: int | None,
    held_bytes: Callable[[], int] | None = None,
) -> int:
    """Turn a budget as people write it into bytes.

    Args:
        budget: ``"6GiB"`` (2**30 bytes each), ``"6GB"`` (10**9), an integer number
            of bytes, or ``"80%"`` or a float in (0, 1], a fraction of `device_bytes`.
            Text without a unit is bytes, and no less than 2**20 of them; of an integer
            below that a warning asks what is meant.
            ``"+400MiB"`` is so much more than is held now.
        device_bytes: What the device has, for fractions; None if unknown.
        held_bytes: Tells what is held now; None where nobody can.

    Returns:
        The budget in bytes, at least 1.

    Raises:
        BudgetError: The value has another type, no known unit, is not positive, more
            than anything has, a fraction of an unknown total, or relative to what
            nobody can tell.
    """
    if isinstance(budget, str):
        percent = _PERCENT.fullmatch(budget)
        if percent is not None:
            return _parse_fraction(budget, float(percent[1]) / 100, device_bytes)
        n_bytes, is_relative = _parse_text(budget)
        if not is_relative:
            return _positive(budget, n_bytes)
        return _positive(budget, n_bytes) + _held(budget, held_bytes)
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool):
        return _bare(budget)
    if not isinstance(budget, (float, np.floating)):
        msg = (
            f"budget must be text such as '6GiB', a number of bytes or a fraction of "
            f"the device's memory such as 0.8, got {budget!r} ({type(budget).__name__})"
        )
        raise BudgetError(msg)
    return _parse_fraction(budget, float(budget), device_bytes)


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
        there = "how much it has is not known"
        if device_bytes is not None:
            there = f"{format_bytes(device_bytes)} are there in all"
        msg = (
            f"there is no budget, and of {device} not all can be one: {there}, and "
            f"everything else that runs lives there as well. Say how much training may "
            f"take, as in '6GiB', or '+2GiB' for so much more than is held now"
        )
        raise BudgetError(msg)
    left = max(_LEFT_BYTES, _LEFT_SHARE * device_bytes)
    if has_ranks:
        left += _LEFT_TO_RANKS_BYTES
    if left >= device_bytes:
        msg = (
            f"{format_bytes(device_bytes)} are there for this process on {device}, and "
            f"{format_bytes(left)} are left to libraries: free memory there (another "
            f"process may hold it), or say what the budget is"
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


def _parse_text(text: str) -> tuple[float, bool]:
    """Return the bytes, and whether they are meant beyond what is held."""
    match = _PATTERN.fullmatch(text)
    if match is None or match[3].upper() not in _UNITS:
        msg = (
            f"budget {text!r} is not a size: write a number with one of B, KB, MB, GB, "
            f"TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), as in "
            f"'6GiB'; '+6GiB' for so much more than is held now, or '80%' of the "
            f"device's memory"
        )
        raise BudgetError(msg)
    factor: int = _UNITS[match[3].upper()]
    n_bytes = float(match[2]) * factor
    if not match[3] and n_bytes < _LEAST_BARE:
        msg = (
            f"budget {text!r} has no unit, and so few bytes hold no step: write "
            f"'{text.strip()}GiB' or '{text.strip()}MiB', or '{text.strip()}B' if "
            f"bytes are meant"
        )
        raise BudgetError(msg)
    return n_bytes, bool(match[1])


def _bare(budget: int) -> int:
    n_bytes = _positive(budget, budget)
    if n_bytes < _LEAST_BARE:
        share = ", 1.0 or '100%' for all that the device has" if n_bytes == 1 else ""
        _log.warning(
            "mimose: the integer %d as a budget is that many bytes, and so few hold no "
            "step: write '%dGiB' or '%dMiB' if these are meant%s",
            *(n_bytes,) * 3,
            share,
        )
    return n_bytes


def _held(budget: str, held_bytes: Callable[[], int] | None) -> int:
    if held_bytes is None:
        msg = (
            f"budget {budget!r} is relative to what is held now, which cannot be told "
            f"here; give all of it, as in '6GiB'"
        )
        raise BudgetError(msg)
    return held_bytes()


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
    if n_bytes > _MOST:
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
