"""One step of one strategy in the grid: a dataclass, and a line of a CSV file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mimose.bench.rows import Row

INTERRUPTED = "interrupted"
"""The `problem` of a strategy that was stopped from outside."""

NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("phase", "plan"), ""),
    **dict.fromkeys(("base_bytes", "start_bytes", "peak_bytes", "reserved_bytes"), 0),
    **dict.fromkeys(("host_bytes", "predicted_growth_bytes", "recomputed_flops")),
    **dict.fromkeys(("seconds", "plan_seconds"), 0.0),
    **{"cache_hit": False, "retries": 0, "loss": float("nan")},
}
"""What is measured of a step that did not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRow(Row):
    """One training step; or, with `problem`, why there is none."""

    workload: str
    scale: str
    """``"tiny"``, ``"small"`` or ``"base"``."""
    is_synthetic: bool
    """Whether the lengths were generated."""
    strategy: str
    budget_share: float | None
    """How far the budget lies from recomputing everything on the longest batch (0) to
    keeping everything (1); None for strategies that know no budget."""
    headroom_bytes: int | None
    """The budget less what is held when training begins."""
    step: int
    """Counts from 0; -1 where the strategy did not run at all."""
    is_measured: bool
    """Whether the warm-up is over."""
    sizes: str
    """The batch's sizes by name, as JSON."""
    phase: str
    """The planner's own word; empty without one."""
    plan: str
    """A letter for each layer's call, as `mimose.bench.grid.menu` spells actions: k
    kept, r recomputed; empty if not known."""
    base_bytes: int
    """Held before training began, the optimizer's state included."""
    start_bytes: int
    """Held when the step began."""
    peak_bytes: int
    """The most held at any moment of forward, backward and optimizer step."""
    reserved_bytes: int
    """The most an allocator had taken from its device so far; on a CPU the peak."""
    host_bytes: int | None
    """The most pinned memory of the host that the process had taken so far, in blocks
    of powers of two; 0 on a CPU, None where an accelerator does not tell."""
    predicted_growth_bytes: float | None
    seconds: float
    """Forward, backward and optimizer step."""
    plan_seconds: float
    cache_hit: bool
    recomputed_flops: int | None
    """None where they cannot be counted."""
    retries: int
    loss: float
    problem: str
    """Why the strategy did not run, or did not go on; empty if all went well."""
    dtype: str
    is_limited: bool = False
    """Whether the system enforced the budget."""
    accuracy: float | None = None
    """On held-out data after the last step, where the workload has any."""

    @property
    def growth_bytes(self) -> int:
        """The peak over what was held before training began."""
        return self.peak_bytes - self.base_bytes

    @property
    def shape(self) -> Mapping[str, int]:
        """The batch's sizes by name."""
        sizes: Mapping[str, int] = json.loads(self.sizes)
        return sizes
