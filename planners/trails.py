"""How a search remembers the way to each walk that it carries on."""

from typing import TypeAlias

import numpy as np

from .base import IntArray

Trail: TypeAlias = list[tuple[IntArray, int]]
"""By event: (n,) the walks carried on, each by ``action * n_before + walk before``,
and how many there were before."""


def read_trail(trail: Trail, at: int) -> IntArray:
    """Read the (E,) actions of one of the last walks.

    Args:
        trail: Of the whole search.
        at: The walk's position among the last.
    """
    actions = np.zeros(len(trail), dtype=np.intp)
    for event in range(len(trail) - 1, -1, -1):
        came, n_before = trail[event]
        actions[event], at = divmod(int(came[at]), n_before)
    return actions
