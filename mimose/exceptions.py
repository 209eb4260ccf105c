"""Every exception that mimose raises on purpose.

The tree::

    MimoseError
    ├── BudgetError (ValueError)            the budget cannot be read
    │   └── InfeasibleBudgetError           no plan reaches the budget
    ├── NoUnitsError (ValueError)           nothing in the model to plan for
    ├── AlreadyAttachedError (RuntimeError) another session plans this model
    │   └── CheckpointingConflictError      the model checkpoints by itself
    ├── ChangedWeightsError (RuntimeError)  a layer cannot be recomputed any more
    ├── RecomputationError (RuntimeError)   a layer was not the same when run again
    ├── NotRecomputableError (RuntimeError) layers must be kept, found out in a forward
    ├── LateChangeError (RuntimeError)      a layer began to change a buffer
    ├── OtherRankError (RuntimeError)       another rank could not run its step
    └── StateMismatchError (ValueError)     saved state of something else
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mimose.planners import InfeasibleBudgetError as _Infeasible


class MimoseError(Exception):
    """The base of all errors of this library."""


class BudgetError(MimoseError, ValueError):
    """The memory budget cannot be understood or used."""


class AdviceError(MimoseError, ValueError):
    """`mimose.advise` cannot make, save or train what it was asked about."""


class InfeasibleBudgetError(BudgetError, _Infeasible):
    """Not even the plan with the lowest peak stays within the budget.

    Attributes:
        budget_bytes: The budget.
        least_peak_bytes: The lowest peak that any plan reaches.
        holders: What holds how many bytes at that peak.
    """


class NoUnitsError(MimoseError, ValueError):
    """No module was found whose activations could be planned."""


class AlreadyAttachedError(MimoseError, RuntimeError):
    """The model is already planned by a session."""


class CheckpointingConflictError(AlreadyAttachedError):
    """The model's own activation checkpointing is switched on."""


class ChangedWeightsError(MimoseError, RuntimeError):
    """A layer's weights are not those of its forward any more."""


class RecomputationError(MimoseError, RuntimeError):
    """A layer could not be computed again as it was; it is kept from now on."""


class NotRecomputableError(MimoseError, RuntimeError):
    """Layers turned out to be such as must be kept, in a forward.

    Most often the forward is run again at once, and this error is not seen. It reaches
    the user where the forward has changed the batch meanwhile, or where other ranks
    wait for the forward and this is not the session's first.

    Attributes:
        layers: The layers' names by their place among the session's layers.
        why: What is wrong with them.
        summary: Both in words, without what to do.
    """

    def __init__(self, layers: Mapping[int, str], why: str) -> None:
        self.layers = dict(layers)
        self.why = why
        self.summary = (
            f"{', '.join(self.layers.values())} cannot be recomputed: {why}. It is "
            f"kept from now on"
        )
        super().__init__(
            f"{self.summary}; run the step again, with the batch as it was."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, for the message is built from them."""
        return type(self), (self.layers, self.why)


class LateChangeError(MimoseError, RuntimeError):
    """A layer changed a buffer, or an object that it holds, as never before.

    Most often that is put back and the forward run again, and this error is not seen.

    Attributes:
        layer: The layer's name.
        buffers: Each buffer's table, by identity, and its name in it.
    """

    def __init__(self, layer: str, buffers: Iterable[tuple[int, str]]) -> None:
        self.layer = layer
        self.buffers = tuple(buffers)
        super().__init__(
            f"{layer} changed a buffer, or an object that it holds, that its forwards "
            f"had not changed before, and it could not be put back. From the next step "
            f"on it is saved for the recomputation; this step has changed it without "
            f"a backward."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, for the message is built from them."""
        return type(self), (self.layer, self.buffers)


class OtherRankError(MimoseError, RuntimeError):
    """Another rank could not run its step, and this one would have waited for it.

    Attributes:
        rank: That rank.
        kind: Its error's name.
        text: What its error says.
    """

    def __init__(self, rank: int, kind: str, text: str) -> None:
        self.rank = rank
        self.kind = kind
        self.text = text
        super().__init__(
            f"rank {rank} could not run this step, so no rank does. Its error was "
            f"{kind}: {text}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, for the message is built from them."""
        return type(self), (self.rank, self.kind, self.text)


class StateMismatchError(MimoseError, ValueError):
    """Saved state belongs to another model, other settings or another device."""


def first_line(error: BaseException) -> str:
    """Return what an error says first, or its name where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
