"""Telling an allocation that failed from any other error.

Note: [Out of memory]
Libraries that allocate by themselves say in words of their own that they could not.
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
