"""Recognizes out-of-memory errors, and makes the error for an impossible budget.

Note: [Out of memory]
Libraries that allocate by themselves have their own texts for a failed allocation. Two
texts are indirect, and count too. torch tries cuDNN's engines one after the other,
ignores those that ran out of memory, and then says that it was unable to find one. And
`cublasCreate` returns CUBLAS_STATUS_NOT_INITIALIZED if the device has no memory for its
workspace. Both texts also have other causes. A wrong guess costs one more forward,
which fails with the same error; a missed one ends a run that a safer plan would save.
NOT_INITIALIZED from any other call is not about memory.
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
"""Texts of errors after a failed allocation: Note: [Out of memory]."""


_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", re.IGNORECASE)
_SCALE = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def asked_bytes(error: BaseException) -> int:
    """Return the bytes of the failed request; 0 if the error does not say."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _SCALE[found[2].lower()]) if found else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on any device: Note: [Out of memory]."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def held_already(
    model: nn.Module, budget_bytes: float, held_bytes: float
) -> InfeasibleBudgetError:
    """Return the error for a budget below what is held before any step.

    Args:
        model: The model.
        budget_bytes: The budget.
        held_bytes: What is held now.
    """
    advice = (
        "That much is held already, before the first step; a step needs more, for "
        "gradients, optimizer state and activations. Raise the budget, or write "
        "'+1GiB' for 1 GiB more than is held now."
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
    """Return the error for an impossible budget, with what holds the least peak.

    Args:
        model: The model.
        budget_bytes: The budget.
        least_peak_bytes: The lowest peak of any plan.
        start_bytes: What is held before the step.
        state_bytes: The part of it that is optimizer state.
        advice: What to do, if the default advice does not apply.
    """
    start_bytes = min(start_bytes, least_peak_bytes)
    own = own_parameters(model)
    parameters = sum(map(local_bytes, own))
    gradients = sum(local_bytes(p.grad) for p in own if p.grad is not None)
    other = start_bytes - parameters - gradients - state_bytes
    is_on_cpu = any(parameter.device.type == "cpu" for parameter in own)
    others = "interpreter, libraries and data" if is_on_cpu else "other memory"
    holders = {
        "parameters": float(parameters),
        "gradients": float(gradients),
        "optimizer state": float(state_bytes),
        f"{others} held before the step": float(max(0.0, other)),
        "the step itself, with everything recomputed": least_peak_bytes - start_bytes,
    }
    return InfeasibleBudgetError(
        budget_bytes,
        least_peak_bytes,
        {name: held for name, held in holders.items() if held},
        *advice,
    )
