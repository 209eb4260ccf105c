"""The budget of host memory, as people write it, and what holds tensors within it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from mimose.actions.offload.codec import OffloadCodec
from mimose.actions.offload.host import HostMemory
from mimose.budget import format_bytes, parse_budget, rank_share
from mimose.exceptions import BudgetError

_SHARE = 0.5
"""Of what is free on the host, where nothing else is said: loaders, page caches and
other processes want some of it, and pinned memory cannot be paged out."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def make_host(
    device: torch.device, host_budget: float | str | None
) -> OffloadCodec | None:
    """Return what holds a session's tensors on the host.

    Args:
        device: The model's.
        host_budget: As `mimose.attach` takes it; None for half of what is free.

    Returns:
        None where the model is on the host itself.

    Raises:
        BudgetError: The budget cannot be read, or there is nothing it is for.
    """
    if device.type == "cpu":
        if host_budget is not None:
            msg = (
                f"host_budget {host_budget!r}: the model is on the host itself, whose "
                f"memory the budget is for; leave host_budget out"
            )
            raise BudgetError(msg)
        return None
    free, total = rank_share(free_bytes()), rank_share(total_bytes())
    n_bytes = parse_host_budget(host_budget, free, total)
    return OffloadCodec(HostMemory(n_bytes, device), device)


def parse_host_budget(
    host_budget: float | str | None, free: int | None, total: int | None = None
) -> int:
    """Turn a budget of host memory into bytes.

    Args:
        host_budget: Bytes, or a share of what is free; None for half of it.
        free: What is free on the host; None if nobody tells.
        total: All that the host has, in bytes; None if nobody tells.

    Raises:
        BudgetError: It is none, a share of what nobody tells, or more than there is.
    """
    if host_budget is None and free is None:
        msg = (
            "host_budget: this system does not tell how much memory is free; give "
            "bytes, as in host_budget='16GiB'"
        )
        raise BudgetError(msg)
    try:
        n_bytes = parse_budget(_SHARE if host_budget is None else host_budget, free)
    except BudgetError as error:
        msg = f"host_budget, of which a share is one of what the host has free: {error}"
        raise BudgetError(msg) from None
    if total is not None and n_bytes > total:
        now = "" if free is None else f", {format_bytes(free)} of it free"
        msg = (
            f"host_budget {host_budget!r} is {format_bytes(n_bytes)}, and the host has "
            f"{format_bytes(total)}{now}: give less, or a share of what is free "
            f"such as 0.5"
        )
        raise BudgetError(msg)
    return n_bytes


def total_bytes() -> int | None:
    """Return what the host, or this container, has; None if nobody tells."""
    found = [_number(limit) for limit, _ in _CGROUPS]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min((n_bytes for n_bytes in found if n_bytes is not None), default=None)


def free_bytes() -> int | None:
    """Return what is free on the host, or for this container; None if nobody tells."""
    found = [_available()]
    for limit, used in _CGROUPS:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            found.append(max(0, most - now))
    return min((n_bytes for n_bytes in found if n_bytes is not None), default=None)


def _available() -> int | None:
    """Return what the system can give without paging anything out."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
