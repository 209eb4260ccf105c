"""Recognizes out-of-memory errors.

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
