"""Memory that ran out: which errors say so, and what holds it.

Note: [Out of memory]
Libraries that allocate by themselves say in other words that they could not.
Two say it indirectly, and are counted: torch tries cuDNN's engines one after the other,
takes no notice of those that ran out of memory, and then says that it was unable to
find one; and `cublasCreate` says CUBLAS_STATUS_NOT_INITIALIZED where the device has no
room for its workspace. Both have other causes, too. Being wrong costs one forward that
fails again, with its own error; not counting them ends a run that had a safer plan. For
any other call NOT_INITIALIZED is not about memory.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from mimose.exceptions import InfeasibleBudgetError
from mimose.inputs.sharding import own_parameters
from mimose.tensors import local_bytes

_OUT_OF_MEMORY = re.compile(
    r"""
    out\ of\ memory                         # allocators, drivers, NCCL, in any case
    | can't\ allocate\ memory               # the CPU's allocator
    | ALLOC(ATION)?_FAILED                  # status of cuBLAS, cuDNN, cuSOLVER, …
    | miopenStatusAllocFailed
    | rocblas_status_memory_error
    | resource\ allocation\ failed          # cuSPARSE's text for its ALLOC_FAILED
    | ERROR_OUT_OF_(DEVICE|HOST)_MEMORY     # SYCL, and Level Zero below it
    | unable\ to\ find\ (an\ engine|a\ valid\ cuDNN\ algorithm)
    | NOT_INITIALIZED.*(cu|hip|roc)blas_?Create
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""What errors say when an allocation has failed: see Note: [Out of memory]."""


_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", re.IGNORECASE)
_SCALE = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def asked_bytes(error: BaseException) -> int:
    """Return the bytes that could not be had, as the error says; 0 if it does not."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _SCALE[found[2].lower()]) if found else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Tell an allocation that failed from any other error, on any device.

    See Note: [Out of memory].
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def held_already(
    model: nn.Module, budget_bytes: float, held_bytes: float
) -> InfeasibleBudgetError:
    """Make the error for a budget below what is held before any step.

    Args:
        model: The model.
        budget_bytes: The budget.
        held_bytes: Held now.
    """
    advice = (
        "That much is held before any step: gradients, optimizer state and activations "
        "come on top. '+1GiB', say, is a budget of so much more than is held now."
    )
    return infeasible(model, budget_bytes, held_bytes, held_bytes, 0.0, advice)


def infeasible(
    model: nn.Module,
    budget_bytes: float,
    least_peak_bytes: float,
    start_bytes: float,
    state_bytes: float,
    *advice: str,
) -> InfeasibleBudgetError:
    """Make the error, with what holds the memory at the least peak.

    Args:
        model: The model.
        budget_bytes: The budget.
        least_peak_bytes: What no plan can go below.
        start_bytes: Held before the step.
        state_bytes: Of it, optimizer state.
        advice: What to do, where the usual advice does not say it.
    """
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
        *advice,
    )
