"""All exceptions that mimose raises.

The tree::

    MimoseError
    ├── BudgetError (ValueError)            the budget cannot be read or used
    │   └── InfeasibleBudgetError           no plan keeps the budget
    ├── AdviceError (ValueError)            mimose.advise cannot use what it got
    ├── RehearsalError (ValueError)         mimose.rehearse cannot use what it got
    ├── NoUnitsError (ValueError)           the model has no layers to plan for
    ├── AlreadyAttachedError (RuntimeError) another session plans this model
    │   └── CheckpointingConflictError      the model checkpoints by itself
    ├── ChangedWeightsError (RuntimeError)  weights changed before the backward
    ├── RecomputationError (RuntimeError)   a recomputation gave other results
    ├── NotRecomputableError (RuntimeError) a forward showed that layers must be kept
    ├── LateChangeError (RuntimeError)      a layer changed a buffer for the first time
    ├── OtherRankError (RuntimeError)       another rank could not run its step
    └── StateMismatchError (ValueError)     saved state of another model or setting
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mimose.planners import InfeasibleBudgetError as _Infeasible


class MimoseError(Exception):
    """The base class of all errors of this library."""

    def __reduce__(self) -> Any:
        """Pickle without a call of the constructor, whose arguments differ."""
        return type(self).__new__, (type(self), *self.args), vars(self)


class BudgetError(MimoseError, ValueError):
    """The memory budget cannot be read or used."""


class AdviceError(MimoseError, ValueError):
    """`mimose.advise` cannot make, save or train the given model or sample."""


class RehearsalError(MimoseError, ValueError):
    """`mimose.rehearse` cannot make or train the given model here."""


class InfeasibleBudgetError(BudgetError, _Infeasible):
    """Even the plan with the lowest peak is over the budget.

    Attributes:
        budget_bytes: The budget.
        least_peak_bytes: The lowest peak that any plan reaches, in bytes.
        holders: What holds how many bytes at that peak.
        advice: What to do; "" for the default advice.
    """


class NoUnitsError(MimoseError, ValueError):
    """The model has no layers to plan for."""


class AlreadyAttachedError(MimoseError, RuntimeError):
    """Another session plans this model already."""


class CheckpointingConflictError(AlreadyAttachedError):
    """The model's own activation checkpointing is switched on."""


class ChangedWeightsError(MimoseError, RuntimeError):
    """A layer's weights changed between its forward and its recomputation."""


class RecomputationError(MimoseError, RuntimeError):
    """A layer's recomputation gave other tensors or failed; it is kept from now on."""


class NotRecomputableError(MimoseError, RuntimeError):
    """A forward has shown that layers cannot be recomputed; they are kept from now on.

    Usually the session runs the forward again at once, and you do not see this error.
    It reaches you if the forward has changed the batch, or if other ranks wait for it
    and it is not the first forward of the session.

    Attributes:
        layers: The names of the layers, by their index among the session's layers.
        why: The reason.
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


class LateChangeError(MimoseError, RuntimeError):
    """A layer changed a buffer, or an object that it holds, for the first time.

    Usually the session restores it and runs the forward again, and you do not see this
    error.

    Attributes:
        layer: The layer's name.
        buffers: For each buffer the identity of its dict, and its name there.
    """

    def __init__(self, layer: str, buffers: Iterable[tuple[int, str]]) -> None:
        self.layer = layer
        self.buffers = tuple(buffers)
        super().__init__(
            f"{layer} changed a buffer, or an object that it holds, which its earlier "
            f"forwards did not change, and mimose could not restore it. This forward "
            f"has no backward, so run the step again, with the batch as it was. From "
            f"the next step on mimose saves what {layer} changes."
        )


class OtherRankError(MimoseError, RuntimeError):
    """Another rank could not run its step, so this rank does not run it either.

    Attributes:
        rank: The other rank.
        kind: The class of its error.
        text: The message of its error.
    """

    def __init__(self, rank: int, kind: str, text: str) -> None:
        self.rank = rank
        self.kind = kind
        self.text = text
        super().__init__(
            f"rank {rank} could not run this step, so no rank does. Its error was "
            f"{kind}: {text}"
        )


class StateMismatchError(MimoseError, ValueError):
    """A saved state belongs to another model, device or setting, or is damaged."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
