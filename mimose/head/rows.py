"""Log-softmax, its loss and its gradient, some rows of logits at a time.

Note: [Rows]
A row's log-softmax and gradient do not depend on the other rows, as long as the kernel
finds it at a like address: vectorised kernels begin at a multiple of 16 bytes. So
chunks begin where the rows before them take a multiple of that. What is summed over all
rows, the loss, is summed by the plain operator itself: it is told of one class, the
label's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mimose.head.edits import Known, nothing_known
from mimose.tensors import sum_of_words
from mimose.torch_private import (
    log_softmax_backward_into,
    log_softmax_into,
    nll_loss,
    nll_loss_backward_into,
)

_CHUNK_BYTES = {"cpu": 2**21}
"""Of a chunk of rows, by device: on a CPU small enough for a cache, ..."""
_LARGE_CHUNK_BYTES = 2**26
"""... elsewhere large enough for a kernel: of 2 MiB launching takes as long as all of
Llama-1B's other kernels at 4,096 tokens."""
_VECTOR_BYTES = 16
_IGNORED = -100
"""The label of ignored rows where only the label's class is left: never a class."""


class How(NamedTuple):
    """What a loss is asked to be."""

    reduction: str
    """One of `REDUCTIONS`."""
    ignore_index: int
    dtype: torch.dtype
    """In which the loss is computed; the logits' own, or a wider one."""


REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
"""Each with the number that torch's operators have for it."""


def loss_of(
    logits: torch.Tensor, labels: torch.Tensor, how: How
) -> tuple[torch.Tensor, torch.Tensor, Known]:
    """Return the loss, the weight of all rows that count, and what tells the logits.

    Args:
        logits: (N, V).
        labels: (N,) classes.
        how: What is asked for.
    """
    space = _Space(logits, how.dtype, 2)
    for at in space.chunks():
        space.log_softmax(at, labels, how)
    is_ignored = labels == how.ignore_index
    classes = torch.zeros_like(labels).masked_fill_(is_ignored, _IGNORED)
    loss, weight = nll_loss(
        -space.known.losses[:, None], classes, None, REDUCTIONS[how.reduction], _IGNORED
    )
    return loss, weight, space.known


def gradient_of(
    grad: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    how: How,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Known]:
    """Return the gradient of the logits, and what told them.

    Args:
        grad: Of the loss.
        logits: (N, V).
        labels: (N,) classes.
        weight: What `loss_of` returned.
        how: What was asked for.
        out: Where to write it, if it is contiguous; the logits themselves will do.
    """
    if out is None or not out.is_contiguous():
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    found = out.detach()
    space = _Space(logits, how.dtype, 3)
    options = None, REDUCTIONS[how.reduction], how.ignore_index, weight
    for at in space.chunks():
        log_p = space.log_softmax(at, labels, how)
        of_loss = grad if grad.dim() == 0 else grad[at]
        # What was cast is not needed any more: the next gradient takes its place.
        of_log_p = space.part(0, at)
        nll_loss_backward_into(
            of_loss, log_p, labels[at], *options, grad_input=of_log_p
        )
        own = found[at] if found.dtype == how.dtype else space.part(2, at)
        log_softmax_backward_into(of_log_p, log_p, 1, how.dtype, out=own)
        if own.dtype != found.dtype:
            found[at] = own
    return found, space.known


class _Space:
    """Some chunks of memory, used again for each chunk of rows.

    Args:
        logits: (N, V).
        dtype: Of the chunks.
        n_parts: How many.

    Attributes:
        known: What tells the logits, of all rows whose log-softmax was taken.
    """

    def __init__(self, logits: torch.Tensor, dtype: torch.dtype, n_parts: int) -> None:
        self._logits, self._dtype = logits, dtype
        self.known = nothing_known(logits, dtype)
        self._n_rows = rows_of_chunk(
            logits.shape[1] * dtype.itemsize, logits.device.type
        )
        self._shape = min(self._n_rows, len(logits)), logits.shape[1]
        self._parts: list[torch.Tensor | None] = [None] * n_parts

    def chunks(self) -> Iterator[slice]:
        """Yield the chunks of rows in order."""
        for start in range(0, len(self._logits), self._n_rows):
            yield slice(start, min(start + self._n_rows, len(self._logits)))

    def part(self, number: int, at: slice) -> torch.Tensor:
        """Return one of the chunks of memory, as long as a chunk of rows is."""
        part = self._parts[number]
        if part is None:
            part = self._logits.new_empty(self._shape, dtype=self._dtype)
            self._parts[number] = part
        return part[: at.stop - at.start]

    def log_softmax(self, at: slice, labels: torch.Tensor, how: How) -> torch.Tensor:
        """Return the log-softmax of some rows, in part 1; part 0 may be needed."""
        rows = self._logits[at]
        self.known.words.add_(sum_of_words(rows))
        if rows.dtype != self._dtype:
            rows = self.part(0, at).copy_(rows)
        log_p: torch.Tensor = log_softmax_into(rows, 1, False, out=self.part(1, at))
        options = None, REDUCTIONS["none"], how.ignore_index
        self.known.losses[at], _ = nll_loss(log_p, labels[at], *options)
        return log_p


def rows_of_chunk(row_bytes: int, device_type: str) -> int:
    """Return how many rows a chunk has: see Note: [Rows].

    The same for any number of rows, so that what a head needs grows evenly with them.
    """
    alike = _VECTOR_BYTES // math.gcd(_VECTOR_BYTES, row_bytes)
    chunk = _CHUNK_BYTES.get(device_type, _LARGE_CHUNK_BYTES)
    return alike * max(1, chunk // (row_bytes * alike))
