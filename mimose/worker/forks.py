"""Locks that a forked child can use, whoever held them in the parent.

A child has but the thread that forked. A lock that another thread held at that moment
would stay held for ever; so the forking thread takes all of them first, and gives them
back on both sides. They are held for microseconds each.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()
_one_at_a_time = threading.RLock()
_held: list[Any] = []
"""By the thread that forks; the others wait."""


def lock() -> Any:
    """Return a reentrant lock that is free in a forked child."""
    made = threading.RLock()
    _LOCKS.add(made)
    return made


def _take() -> None:
    _one_at_a_time.acquire()
    for each in list(_LOCKS):
        each.acquire()
        _held.append(each)


def _give_back() -> None:
    while _held:
        _held.pop().release()
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_take, after_in_parent=_give_back, after_in_child=_give_back
    )
