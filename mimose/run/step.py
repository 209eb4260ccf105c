"""One step: a forward of the root, until its backward has ended."""

from __future__ import annotations

import weakref
from typing import Any

from mimose.decide.policy import Decision
from mimose.measure.retained import Carried
from mimose.measure.trace import Trace
from mimose.planners import EveryK, NoPlan, Planner
from mimose.records import StepRecord
from mimose.run.events import FirstCallSeen
from mimose.types import KEEP, RECOMPUTE, StepFacts, Uncounted


class Step:
    """One forward of the root, until its backward has ended."""

    def __init__(
        self, record: StepRecord, facts: StepFacts, decision: Decision, planner: Planner
    ) -> None:
        self.record = record
        self.facts = facts
        self.decision = decision
        self.trace: Trace | None = None
        self.spare: Trace | None = None
        """A trace that has its start, for a step that may yet be one to measure."""
        self.uncounted: Uncounted | None = None
        self.knows_flops = False
        self.on_first_call: FirstCallSeen | None = None
        self.graph: weakref.ref[Any] | None = None
        self.carried: Carried | None = None
        self.carried_bytes = 0
        self.released_bytes = 0
        self.peak_bytes = 0
        self.calls: tuple[int, ...] = ()
        self.began = 0.0
        self.clock = 0
        """Autograd's, as its forward began."""
        self.in_backward = False
        self.saw_end = False
        self.unseen = ""
        """Why no backward can be seen."""
        self.is_shared = False
        self.n_graphs = 0
        """Compiled before it."""
        self.is_closed = False
        self._every = planner.k if isinstance(planner, EveryK) else 0
        self._keeps = isinstance(planner, NoPlan)
        self._unplanned: list[str] = []

    def action(self, index: int) -> str:
        """Return the action of an event no plan speaks of: the baselines' own."""
        if self._keeps or (self._every and index % self._every):
            action = KEEP
        else:
            action = RECOMPUTE
        self._unplanned.append(action)
        return action

    def make_safest(self) -> None:
        """Recompute everything from now on."""
        self._keeps, self._every = False, 0
        self._unplanned.clear()
        self.decision = Decision("fallback", None)

    def add_flops(self, flops: int) -> None:
        """Take in the FLOPs of a recomputation."""
        self.record.recomputed_flops += flops

    def actions(self) -> tuple[str, ...]:
        """Return what the events did, in order."""
        if self.trace is not None:
            return tuple(event.action for event in self.trace.events)
        if self.decision.chosen is not None:
            return self.decision.chosen.plan.actions
        return tuple(self._unplanned)

    def events(self) -> tuple[str, ...]:
        """Return the names of the events, where they are known."""
        if self.trace is not None:
            return tuple(event.name for event in self.trace.events)
        chosen = self.decision.chosen
        return () if chosen is None else chosen.events

    @property
    def saw_gradient(self) -> bool:
        """Whether a backward began."""
        events = self.trace.events if self.trace is not None else ()
        return self.in_backward or any(event.has_gradient for event in events)
