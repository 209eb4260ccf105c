"""Every exception that mimose raises on purpose.

The tree::

    MimoseError
    ├── BudgetError (ValueError)            the budget cannot be read
    │   └── InfeasibleBudgetError           no plan reaches the budget
    ├── NoUnitsError (ValueError)           nothing in the model to plan for
    ├── AlreadyAttachedError (RuntimeError) somebody else plans this model
    │   └── CheckpointingConflictError      the model checkpoints by itself
    ├── ChangedWeightsError (RuntimeError)  a layer cannot be recomputed any more
    ├── RecomputationError (RuntimeError)   a layer was not the same when run again
    └── StateMismatchError (ValueError)     saved state of something else
"""

from __future__ import annotations

from mimose.planners import InfeasibleBudgetError as _Infeasible


class MimoseError(Exception):
    """The base of all errors of this library."""


class BudgetError(MimoseError, ValueError):
    """The memory budget cannot be understood or used."""


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


class StateMismatchError(MimoseError, ValueError):
    """Saved state belongs to another model, other settings or another device."""


def first_line(error: BaseException) -> str:
    """Return what an error says first, or its name where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
