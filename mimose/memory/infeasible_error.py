"""What holds the memory, where no plan keeps a budget."""

from __future__ import annotations

from torch import nn

from mimose.exceptions import InfeasibleBudgetError
from mimose.inputs.sharding import own_parameters
from mimose.tensors import local_bytes


def held_already(
    model: nn.Module, budget_bytes: float, held_bytes: float
) -> InfeasibleBudgetError:
    """Make the error for a budget below what is held before any step.

    Args:
        model: The model.
        budget_bytes: The budget.
        held_bytes: Held now.
    """
    total = float(sum(map(local_bytes, own_parameters(model))))
    parameters = min(total, held_bytes)
    holders = {"parameters": parameters, "other things": held_bytes - parameters}
    advice = (
        "That much is held before any step: gradients, optimizer state and activations "
        "come on top. '+1GiB', say, is a budget of so much more than is held now."
    )
    return InfeasibleBudgetError(budget_bytes, held_bytes, holders, advice)


def infeasible(
    model: nn.Module,
    budget_bytes: float,
    least_peak_bytes: float,
    start_bytes: float,
    state_bytes: float,
) -> InfeasibleBudgetError:
    """Make the error, with what holds the memory at the least peak."""
    start_bytes = min(start_bytes, least_peak_bytes)
    own = own_parameters(model)
    parameters = sum(map(local_bytes, own))
    gradients = sum(local_bytes(p.grad) for p in own if p.grad is not None)
    other = start_bytes - parameters - gradients - state_bytes
    holders = {
        "parameters": float(parameters),
        "gradients": float(gradients),
        "optimizer state": float(state_bytes),
        "other things held before the step": float(max(0.0, other)),
        "the step itself, everything recomputed": least_peak_bytes - start_bytes,
    }
    return InfeasibleBudgetError(
        budget_bytes,
        least_peak_bytes,
        {name: held for name, held in holders.items() if held},
    )
