"""What the Mimose paper reports of its four language tasks.

Liao et al., "Exploiting Input Tensor Dynamics in Activation Checkpointing for Efficient
Training on GPU", IPDPS 2023, on a V100 in fp32: times from Fig. 10 (read off the plot,
±0.02), least and unlimited memory as told. "static" is there called Sublinear, and is
the paper's own planner frozen at the longest input. For DTR the memory is what it used,
which is more than it was asked to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Published:
    """One task: time ÷ unlimited training at so many GB."""

    least_gb: float
    """With every layer recomputed."""
    unlimited_gb: float
    points: Mapping[str, Points]
    """By strategy: (GB, time ÷ unlimited training)."""

    def shares(self, strategy: str) -> Points:
        """Return (share, time), a budget told as `GridRow.budget_share` tells it."""
        room = self.unlimited_gb - self.least_gb
        return tuple(
            ((gb - self.least_gb) / room, time) for gb, time in self.points[strategy]
        )


PUBLISHED: Mapping[str, Published] = {
    "mc-roberta": Published(
        3.36,
        9.95,
        {
            "mimose": ((4, 1.19), (5, 1.065), (6, 1.06), (7, 1.045), (8, 1.04)),
            "static": ((3.5, 1.37), (4.4, 1.345), (6, 1.295), (7, 1.22), (8, 1.175)),
            "DTR": (
                (6.9, 1.47),
                (7.5, 1.147),
                (8, 1.15),
                (8.5, 1.145),
                (9, 1.133),
                (9.5, 1.153),
            ),
        },
    ),
    "tr-t5": Published(
        5.8,
        19.7,
        {
            "mimose": ((6.65, 1.36), (9.15, 1.385), (12.75, 1.125), (13.8, 1.065)),
            "static": ((6.65, 1.535), (9.15, 1.26), (12.7, 1.29), (13.8, 1.135)),
            "DTR": ((14, 1.99), (15, 1.62), (15.9, 1.51), (16.6, 1.465)),
        },
    ),
    "qa-bert": Published(
        3.1,
        9.5,
        {
            "mimose": ((4, 1.26), (5, 1.165), (6, 1.10), (7, 1.07), (8, 1.02)),
            "static": ((4, 1.39), (5, 1.31), (5.9, 1.26), (6.9, 1.22), (7.9, 1.165)),
            "DTR": ((7, 1.365), (7.5, 1.30), (8, 1.28), (8.5, 1.23), (9, 1.21)),
        },
    ),
    "tc-bert": Published(
        3.6,
        13.4,
        {
            "mimose": ((4, 1.055), (5, 1.045), (6, 1.01), (7, 1.02), (8, 1.02)),
            "static": ((4, 1.31), (5, 1.30), (5.9, 1.28), (6.9, 1.22), (7.9, 1.19)),
            "DTR": ((7.5, 1.29), (8, 1.21), (8.5, 1.195), (9, 1.20), (10, 1.20)),
        },
    ),
}
"""By workload."""
