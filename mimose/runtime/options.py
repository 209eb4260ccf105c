"""The settings of a session, as `mimose.attach` has read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from mimose.actions.base import Action
from mimose.actions.host import Host
from mimose.actions.registry import choose
from mimose.budget import Budget
from mimose.memory.meters import Meter
from mimose.model.layers import LayersSpec
from mimose.planners import Planner
from mimose.predictors import Estimator


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The settings of a session; see `mimose.attach`."""

    budget: Budget | Callable[[], Budget]
    planner: Planner
    actions: Sequence[Action] = field(default_factory=lambda: choose("auto"))
    layers: LayersSpec = None
    predictor: Estimator | None = None
    cache_size: int = 1024
    warns: bool = False
    """Whether an impossible budget gives a warning instead of an error."""
    meter: Meter | str | None = None
    record_to: str | PathLike[str] | None = None
    wall: bool = True
    grace: float | str | None = None
    """By how much a backward may pass the budget; see `mimose.attach`."""
    refine: bool = True
    """Whether there is a worker thread."""
    host: Host | None = None
    """Holds tensors in the host's memory, within its budget."""
    byte_flops: float | None = None
    """What moving a byte costs; see `mimose.attach`."""
    checks: str = "sampled"
    """What calls compare that rebuild tensors; see `mimose.attach`."""
    agree: Any = "auto"
    """Which ranks agree on plans: see `mimose.distributed.find_ranks`."""

    @property
    def planner_name(self) -> str:
        """The planner's name, or its class."""
        name = getattr(self.planner, "name", None)
        return name if isinstance(name, str) else type(self.planner).__qualname__

    @property
    def action_at(self) -> Callable[[int], str] | None:
        """A baseline's choice by a layer call's position; None if plans are made."""
        found: Callable[[int], str] | None = getattr(self.planner, "action_at", None)
        return found

    @property
    def plans(self) -> bool:
        """Whether plans are made. A baseline does the same in every step."""
        return self.action_at is None
