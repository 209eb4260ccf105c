"""Cross-entropy as torch has it, by chunks of rows where that gives the same bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from mimose.exceptions import MimoseError
from mimose.head.edits import Known, refuse, refuse_edited
from mimose.head.holders import holders_of, is_alone
from mimose.head.rows import REDUCTIONS, How, gradient_of, loss_of
from mimose.torch_private import keeps_graph, top_transform

LEAST_BYTES = 2**20
"""Smaller logits are left to the plain function: there is little to save, and a call of
an operator costs as much as its work."""
CAST = frozenset((torch.bfloat16, torch.float16, torch.float32))
"""Precisions that float32 holds: it can be cast to by rows."""
_KNOWN_DTYPES = CAST | {torch.float64}
_KNOWN = frozenset((torch.Tensor, torch.nn.Parameter))
_TOGETHER = (
    "a loss that went by rows is differentiated a second time after create_graph=True: "
    "its gradient was made with a graph (a gradient penalty, perhaps), and now comes a "
    "backward of the loss, alone or in a sum with that gradient, which would not round "
    "as torch's own does. Use torch.nn.functional.cross_entropy there; in a session of "
    "a model of transformers give model.loss_function a function of your own"
)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    cast: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `torch.nn.functional.cross_entropy` to the last bit, in less memory.

    Logits of shape (N, V), with a class for each row, are worked on by chunks of rows,
    forward and backward: nothing but their gradient takes as much as they do, and that
    takes their place where nobody else holds them. It costs one log-softmax more.

    Where rows alone do not give the same bits, the plain function does the work: with
    class weights, label smoothing, probabilities as targets or more dimensions, inside
    of transforms of `torch.func` and of compiled code, and on logits of less than a
    MiB. A gradient may be differentiated again (``create_graph=True``); the loss itself
    may not go backward any more then, neither alone nor in one sum with that gradient.

    The logits may not be edited between the loss and its backward, which plain
    cross-entropy allows.

    Args:
        input: (N, V) logits, best as the model made them.
        target: (N,) classes.
        weight: As for torch, and so are the others but the last.
        size_average: Deprecated.
        ignore_index: Rows of this class do not count.
        reduce: Deprecated.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: Between 0 and 1.
        cast: What the logits would be cast to before; ``cast=torch.float32`` is
            ``cross_entropy(input.float(), target)`` without that copy.

    Returns:
        The loss.

    Raises:
        MimoseError: In a backward of the loss after one with ``create_graph=True``.
        RecomputationError: In a backward, where the logits were edited meanwhile.
    """
    is_usual = weight is None and size_average is None and reduce is None
    if is_usual and label_smoothing == 0.0 and _goes_by_rows(input, target, reduction):
        dtype = _dtype_of_loss(input if cast is None else input.new_empty(0).to(cast))
        if dtype.itemsize >= input.dtype.itemsize:
            how = How(reduction, ignore_index, dtype)
            loss: torch.Tensor = _ByRows.apply(input, target, how)  # type: ignore[no-untyped-call]
            return loss
    return F.cross_entropy(
        input if cast is None else input.to(cast),
        target,
        weight,
        size_average,
        ignore_index,
        reduce,
        reduction,
        label_smoothing,
    )


def _goes_by_rows(input: Any, target: Any, reduction: str) -> bool:
    """Whether there is a class for each row, and the tensors are torch's own."""
    return (
        type(input) in _KNOWN
        and type(target) in _KNOWN
        and not torch.compiler.is_compiling()
        and input.layout == target.layout == torch.strided
        and input.device == target.device
        and input.dim() == 2
        and target.shape == input.shape[:1]
        and input.dtype in _KNOWN_DTYPES
        and target.dtype == torch.int64
        and reduction in REDUCTIONS
        and input.nbytes >= LEAST_BYTES
        and top_transform() is None
        and not _has_tangent(input)
    )


def _has_tangent(input: torch.Tensor) -> bool:
    unpack: Any = forward_ad.unpack_dual
    return unpack(input).tangent is not None


def _dtype_of_loss(logits: torch.Tensor) -> torch.dtype:
    """Return the precision in which the plain function would compute here."""
    if not torch.is_autocast_enabled(logits.device.type):
        return logits.dtype
    label = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.detach().new_zeros(1, 1), label).dtype


class _ByRows(torch.autograd.Function):
    """Keeps the logits and what tells them, and makes the rest again in backward.

    Where nobody else holds them, their gradient takes their place.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, how: How
    ) -> torch.Tensor:
        loss, weight, known = loss_of(logits, labels, how)
        ctx.save_for_backward(logits, labels, weight, *known)
        ctx.how, ctx.is_differentiated = how, False
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        logits, labels, weight, *told = _saved(ctx)
        known = Known(*told)
        if ctx.is_differentiated:
            raise MimoseError(_TOGETHER)
        if torch.is_grad_enabled():
            with torch.no_grad():
                *_, again = loss_of(logits.detach(), labels, ctx.how)
            refuse_edited(known, again)
            ctx.is_differentiated = True
            return _differentiable(grad, logits, labels, ctx.how), None, None
        is_free = not keeps_graph() and is_alone(holders_of(logits))
        out = logits if is_free else None
        found, again = gradient_of(grad, logits, labels, weight, ctx.how, out)
        refuse_edited(known, again)
        return found, None, None


def _saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Return what was saved, unless it was edited in a way that autograd counts."""
    try:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            refuse(error)
        raise
    return saved


def _differentiable(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, how: How
) -> torch.Tensor:
    """Return the gradient as the plain function gives it, with a graph of its own."""
    loss = F.cross_entropy(
        logits.to(how.dtype),
        labels,
        ignore_index=how.ignore_index,
        reduction=how.reduction,
    )
    (found,) = torch.autograd.grad(loss, logits, grad, create_graph=True)
    return found
