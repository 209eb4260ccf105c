"""Autocast as it was in a forward, for its recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Cast(NamedTuple):
    """What autocast is set to for one kind of device."""

    kind: str
    is_enabled: bool
    dtype: torch.dtype
    is_cached: bool


def autocast_now(kinds: tuple[str, ...]) -> tuple[Cast, ...]:
    """Return what autocast is set to; nothing where it is off for all.

    Args:
        kinds: Types of devices.
    """
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            break
    else:
        return ()
    is_cached = torch.is_autocast_cache_enabled()
    return tuple(
        Cast(
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            is_cached,
        )
        for kind in kinds
    )


@contextlib.contextmanager
def in_autocast(kinds: tuple[str, ...], before: tuple[Cast, ...]) -> Iterator[None]:
    """Set autocast for a while to what `autocast_now` returned.

    Args:
        kinds: Types of devices.
        before: What it returned of them.
    """
    with contextlib.ExitStack() as stack:
        if not before:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
        for cast in before:
            stack.enter_context(
                torch.autocast(
                    cast.kind,
                    dtype=cast.dtype,
                    enabled=cast.is_enabled,
                    cache_enabled=cast.is_cached,
                )
            )
        yield
