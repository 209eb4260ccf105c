"""What a step is to do: plain data, made once."""

from __future__ import annotations

from dataclasses import dataclass, field

from mimose.policy.plan_cache import CachedPlan
from mimose.records import Phase
from mimose.types import Uncounted


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does."""

    phase: Phase
    chosen: CachedPlan | None
    """None: everything is recomputed, and measured."""
    growth_bytes: float | None = None
    """Predicted, at the exact sizes, and corrected."""
    raw_growth_bytes: float = 0.0
    """The same, as the cost model says it."""
    flops: tuple[int, ...] = ()
    """Recomputed by each event under the plan, as far as they are known."""
    uncounted: Uncounted = field(default_factory=dict)
    """Recomputations whose FLOPs are not known yet."""
    cache_hit: bool = False
    released_bytes: float = 0.0
    """Outputs of the last step that were taken to go in this one."""
    is_measured: bool = False
    """Whether the boundaries are read although there is a plan."""
    is_whole: bool = False
    """Whether what is recomputed runs to its end, as it does on another rank."""
    reason: str = ""
    """Why it is not an ordinary step; "" if it is."""
