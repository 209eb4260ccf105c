"""The interface of actions, and the arguments that they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mimose.exactness.layer import Layer
from mimose.measure.gauges import Gauge
from mimose.measure.trace import Trace
from mimose.planners import ActionSpec
from mimose.types import OnRecompute


@dataclass(frozen=True, slots=True)
class Probe:
    """Measures a layer call."""

    trace: Trace
    index: int
    """The index of the call in the trace."""
    gauge: Gauge
    """Counts what a run of the forward holds and computes."""
    inputs: list[Any]
    """The input tensors of the call."""
    around: Callable[[OnRecompute, Invocation, Probe], OnRecompute] | None = None
    """Lets other actions see what a recomputation has made."""


class Invocation(NamedTuple):
    """One layer call in a training step."""

    layer: Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_recompute: OnRecompute | None = None
    """Runs in place of the recomputation, which it gets, such as to count its FLOPs."""
    is_whole: bool = False
    """Whether a recomputation runs to its end."""

    def forward(self) -> Any:
        """Run the layer's own forward."""
        return self.layer.forward(*self.args, **self.kwargs)


class Action(Protocol):
    """What may happen to the activations of a layer call."""

    spec: ActionSpec

    def why_not(self, layer: Layer) -> str | None:
        """Return why a layer cannot run under it, for the report; None if it can."""
        ...

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward under the action, and prepare its backward.

        Args:
            call: The call.
            probe: Measures it; None if the step is not measured.

        Returns:
            What the layer returns.
        """
        ...
