"""What an action is, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mimose.exactness.unit import Unit
from mimose.memory.marks import Gauge, Trace
from mimose.planners import ActionSpec
from mimose.types import OnRecompute


@dataclass(frozen=True, slots=True)
class Probe:
    """How a call is measured."""

    trace: Trace
    index: int
    """The event's, in the trace."""
    gauge: Gauge
    """Counts what a run of the forward holds and computes."""
    inputs: list[Any]
    """The tensors that the call is given."""


class UnitCall(NamedTuple):
    """One call of a unit, in a step that trains."""

    unit: Unit
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_recompute: OnRecompute | None = None
    """Has to see the forward run again, such as to count its FLOPs."""
    is_whole: bool = False
    """Whether a recomputation is to run to its end."""

    def forward(self) -> Any:
        """Run the unit's own forward."""
        return self.unit.forward(*self.args, **self.kwargs)


class Action(Protocol):
    """What may happen to the activations of a call."""

    spec: ActionSpec

    def refuses(self, unit: Unit) -> str:
        """Return why a unit cannot run under it, for the report; "" if it can."""
        ...

    def run(self, call: UnitCall, probe: Probe | None) -> Any:
        """Run the forward under the action; its backward is arranged for.

        Args:
            call: The call.
            probe: Measures it; None in a step that is not measured.

        Returns:
            What the unit returns.
        """
        ...
