"""What an action is, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mimose.exactness.layer import Layer
from mimose.memory.marks import Gauge, Trace
from mimose.planners import ActionSpec
from mimose.types import OnRecompute


@dataclass(frozen=True, slots=True)
class Probe:
    """How a call is measured."""

    trace: Trace
    index: int
    """The call's, in the trace."""
    gauge: Gauge
    """Counts what a run of the forward holds and computes."""
    inputs: list[Any]
    """The tensors that the call is given."""


class Invocation(NamedTuple):
    """One call of a layer, in a step that trains."""

    layer: Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_recompute: OnRecompute | None = None
    """Has to see the forward run again, such as to count its FLOPs."""
    is_whole: bool = False
    """Whether a recomputation is to run to its end."""

    def forward(self) -> Any:
        """Run the layer's own forward."""
        return self.layer.forward(*self.args, **self.kwargs)


class Action(Protocol):
    """What may happen to the activations of a call."""

    spec: ActionSpec

    def why_not(self, layer: Layer) -> str:
        """Return why a layer cannot run under it, for the report; "" if it can."""
        ...

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward under the action; its backward is arranged for.

        Args:
            call: The call.
            probe: Measures it; None in a step that is not measured.

        Returns:
            What the layer returns.
        """
        ...
