"""What MONeT (Shah et al., ICLR 2021) reports, and what lies between its rows.

Memory there is all that PyTorch holds at the peak of a step on a GPU of 16 GB, at
batches that nearly fill it: weights and gradients are a small part. Schedules were
solved for up to 24 hours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

SOLVER_SECONDS = 24 * 3600.0
"""What its solver was given for a schedule."""
RANGE = (0.09, 0.16)
"""Its overhead at a third of the memory, over all models."""


class Curve(NamedTuple):
    """One model's rows."""

    plain_gb: float
    """What plain PyTorch holds."""
    rows: tuple[tuple[float, float], ...]
    """GB, and overhead as a share; less and less memory."""


_ROWS: Mapping[str, tuple[float, str]] = {
    "resnet50": (
        15.06,
        "10.01:3.22 9.01:4.68 8.01:5.56 6.99:7.28 6.00:9.31 4.99:11.95",
    ),
    "googlenet": (
        14.93,
        "9.98:7.13 8.99:7.87 8.01:8.44 7.02:9.71 6.01:12.14 4.99:15.77",
    ),
    "unet": (14.32, "10.01:-4.10 9.01:-2.07 8.02:-0.09 7.00:1.39 6.01:4.95 5.01:11.51"),
    "mobilenet": (
        14.46,
        "10.02:2.40 9.01:3.10 8.02:4.77 7.01:5.53 6.01:7.55 5.01:8.72",
    ),
    "vgg16": (14.12, "9.71:-5.30 8.66:-4.64 7.88:-2.18 6.82:1.99 5.90:5.44 5.51:9.11"),
}
"""GB of plain PyTorch; then GB and per cent of overhead."""


def _curve(plain_gb: float, text: str) -> Curve:
    pairs = (pair.split(":") for pair in text.split())
    return Curve(plain_gb, tuple((float(gb), float(more) / 100) for gb, more in pairs))


CURVES: Mapping[str, Curve] = {
    name: _curve(plain_gb, text) for name, (plain_gb, text) in _ROWS.items()
}
"""By model."""


class Published(NamedTuple):
    """Its overhead at a share of plain training's memory."""

    overhead: float
    share: float
    """Of the memory; more than was asked for where its rows end before."""


def published(model: str, share: float) -> Published | None:
    """Return its overhead at a share of the memory, linear between two rows.

    Args:
        model: By name; None is returned where it has no row of it.
        share: Of what plain training holds.
    """
    if model not in CURVES:
        return None
    plain, rows = CURVES[model]
    points = [(1.0, 0.0), *((gb / plain, overhead) for gb, overhead in rows)]
    least_share, overhead = points[-1]
    if share <= least_share:
        return Published(overhead, least_share)
    for (high, above), (low, below) in itertools.pairwise(points):
        if low <= share <= high:
            part = (high - share) / (high - low)
            return Published(above + part * (below - above), share)
    return Published(0.0, share)
