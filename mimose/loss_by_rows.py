"""Cross-entropy by rows of logits, with the bits of torch's loss and gradients.

Plain cross-entropy holds up to six more tensors of the logits' size: a copy in float32,
its log-softmax and two gradients. Rows are independent, so this module makes all of
these for one chunk of rows at a time, and again in the backward. Losses of
transformers' models are computed this way in steps whose budget needs it
(`mimose.runtime.loss_choice`).

Note: [Rows]
The log-softmax and the gradient of a row have the same bits in any chunk if the row has
the same alignment: vectorized kernels begin at a multiple of 16 bytes, and so does each
chunk. The sum over all rows is left to the plain operator, on one class, the label's,
because another order would round differently.

Note: [Edits]
Plain cross-entropy saves its log-softmax, so edits of the logits before the backward do
no harm. This loss reads the logits again. Autograd counts edits of tensors, but not
those through ``.data`` or a NumPy array. So the sum of the logits' words is saved, and
the loss of each row, which would change with the order of the words.

Note: [Sole holder]
The gradient overwrites the logits if only the backward holds them. Names in user code
count on the tensor's Python object, nodes of the graph on its C++ object, views and
aliases on its storage; weak references count too. The counts of a sole holder depend on
torch and Python, so they are measured once on a small tensor, in a separate thread
without the user's hooks and modes. With any other counts the logits are not touched.
For 4 × 4,096 tokens of Llama-1B this saves 3.5 GiB, a fifth of what a card of 24 GiB
leaves for a step: plans keep three layers in place of one, and no step runs again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import getweakrefcount

import torch
import torch.nn.functional as F

from mimose.exceptions import MimoseError, RecomputationError
from mimose.tensors import different_bits, sum_of_words
from mimose.torch_private import (
    base_of,
    is_dual_level_open,
    keeps_graph,
    log_softmax_backward_into,
    log_softmax_into,
    nll_loss,
    nll_loss_backward_into,
    pytree,
    queue_callback,
    storage_key,
    storage_users,
    tensor_users,
    top_transform,
)

LEAST_BYTES = 2**20
"""Smaller logits use torch's function: calling an operator costs as much as its
work."""
_CHUNK_BYTES = {"cpu": 2**21}
"""The size of a chunk of rows by device: on a CPU small enough for a cache."""
_LARGE_CHUNK_BYTES = 2**26
"""On other devices: so large that kernels take longer than their launches."""
_VECTOR_BYTES = 16
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
"""The number of each reduction in torch's operators."""
_IGNORED = -100
"""The label of ignored rows, which is never a class."""
_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_NO_GRAPH = (
    "a loss that is computed by rows has no second derivative (create_graph=True, as "
    "in a gradient penalty): {instead}"
)
_EDITED = (
    "logits (or their labels) were edited between a loss that is computed by rows and "
    "its backward, which reads them again: zero this step's gradients, and edit a copy "
    "(logits.detach().clone()), or edit them after the backward. Or {instead}"
)
_INSTEAD = (
    "use torch.nn.functional.cross_entropy instead of mimose.cross_entropy; for a "
    "model of transformers in a session, set your own model.loss_function"
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
    """Compute `torch.nn.functional.cross_entropy`, bit for bit, in less memory.

    It works on (N, V) logits with one class for each row, in chunks of rows, in the
    forward and again in the backward. Only the gradient needs as much memory as the
    logits, and it takes their place if no other code holds them. The cost is one more
    log-softmax.

    In all other cases it calls torch's function: with class weights, label smoothing,
    probabilities as targets or more dimensions, inside transforms of `torch.func` and
    compiled code, and for logits of less than 1 MiB.

    Unlike for plain cross-entropy, you must not edit the logits between the loss and
    its backward, nor run the backward with ``create_graph=True``.

    ``torch.nn.functional.linear_cross_entropy`` (torch 2.13) never makes all logits: it
    needs less memory than this function, but changes the last bits.

    Args:
        input: (N, V) The logits, best as the model made them.
        target: (N,) The class of each row.
        weight: As for torch.
        size_average: Deprecated in torch.
        ignore_index: Rows of this class do not count.
        reduce: Deprecated in torch.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: From 0 to 1, as for torch.
        cast: A dtype: ``cast=torch.float32`` is ``cross_entropy(input.float(),
            target)`` without the copy.

    Returns:
        () The loss; (N,) with ``reduction="none"``.

    Raises:
        MimoseError: In the backward, with ``create_graph=True``.
        RecomputationError: In the backward, if the logits were edited.
    """
    is_usual = weight is None and size_average is None and reduce is None
    if is_usual and label_smoothing == 0.0 and _goes_by_rows(input, target, reduction):
        dtype = _dtype_of_loss(input if cast is None else input.new_empty(0).to(cast))
        if dtype.itemsize >= input.dtype.itemsize:
            options = _Options(_REDUCTIONS[reduction], ignore_index, dtype)
            loss: torch.Tensor = _ByRows.apply(input, target, options)  # type: ignore[no-untyped-call]
            return loss
    whole = input if cast is None else input.to(cast)
    others = weight, size_average, ignore_index, reduce, reduction, label_smoothing
    return F.cross_entropy(whole, target, *others)


def _goes_by_rows(input: Any, target: Any, reduction: str) -> bool:
    """Whether there is a class for each row, and the tensors are torch's own."""
    return (
        type(input) in _TENSORS
        and type(target) in _TENSORS
        and not torch.compiler.is_compiling()
        and input.layout == target.layout == torch.strided
        and input.device == target.device
        and input.dim() == 2
        and target.shape == input.shape[:1]
        and input.dtype in _DTYPES
        and target.dtype == torch.int64
        and reduction in _REDUCTIONS
        and input.nbytes >= LEAST_BYTES
        and top_transform() is None
        and not is_dual_level_open()
    )


def _dtype_of_loss(logits: torch.Tensor) -> torch.dtype:
    """Return the precision in which the plain function would compute here."""
    if not torch.is_autocast_enabled(logits.device.type):
        return logits.dtype
    label = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.detach().new_zeros(1, 1), label).dtype


class _Options(NamedTuple):
    """The options of a loss."""

    reduction: int
    ignore_index: int
    dtype: torch.dtype
    """The dtype in which the loss is computed: the logits' own, or a wider one."""


class _ByRows(torch.autograd.Function):
    """Keeps the logits and their fingerprint; makes the rest again in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, options: _Options
    ) -> Any:
        seen = _nothing_seen(logits, options)
        for _ in _log_softmax(logits, labels, options, seen, n_spare=0):
            pass
        is_ignored = labels == options.ignore_index
        classes = torch.zeros_like(labels).masked_fill_(is_ignored, _IGNORED)
        of_labels, reduction = -seen[0][:, None], options.reduction
        loss, weight = nll_loss(of_labels, classes, None, reduction, _IGNORED)
        ctx.save_for_backward(logits, labels, weight, *seen)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise MimoseError(_NO_GRAPH.format(instead=_INSTEAD))
        try:
            logits, labels, weight, *saved = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise RecomputationError(_EDITED.format(instead=_INSTEAD)) from error
            raise
        is_free = logits.is_contiguous() and not keeps_graph()
        if is_free and _holders(logits) in _sole_holders():
            out = logits.detach()
        else:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        (grad,), options = grads, ctx.options
        how = None, options.reduction, options.ignore_index, weight
        seen = _nothing_seen(logits, options)
        chunks = _log_softmax(logits, labels, options, seen, n_spare=1)
        for at, log_p, spare, *narrow in chunks:
            of_loss = grad if grad.dim() == 0 else grad[at]
            nll_loss_backward_into(of_loss, log_p, labels[at], *how, grad_input=spare)
            own = narrow[0] if narrow else out[at]
            log_softmax_backward_into(spare, log_p, 1, options.dtype, out=own)
            if narrow:
                out[at] = own
        _raise_if_edited(saved, seen)
        return out, None, None


def _nothing_seen(
    logits: torch.Tensor, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make what logits are known by, to be filled in: see Note: [Edits].

    (N,) losses of the rows, and () the sum of their bits, in integers of 8 bytes.
    """
    words = torch.zeros((), dtype=torch.int64, device=logits.device)
    losses = torch.empty(len(logits), dtype=options.dtype, device=logits.device)
    return losses, words


def _log_softmax(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: _Options,
    seen: tuple[torch.Tensor, torch.Tensor],
    n_spare: int,
) -> Iterator[tuple[Any, ...]]:
    """Yield the log-softmax of chunks of rows, and fill in what is seen of them.

    Each comes as its rows, itself and `n_spare` chunks to write to; one more where
    logits are cast, into the first. All are overwritten by the next. Chunks are the
    same for any number of rows, so that what a head needs grows evenly with them.
    """
    is_cast = logits.dtype != options.dtype
    row_bytes = logits.shape[1] * options.dtype.itemsize
    losses, words = seen
    alike = _VECTOR_BYTES // math.gcd(_VECTOR_BYTES, row_bytes)
    chunk_bytes = _CHUNK_BYTES.get(logits.device.type, _LARGE_CHUNK_BYTES)
    n_rows = alike * max(1, chunk_bytes // (row_bytes * alike))
    shape = min(n_rows, len(logits)), logits.shape[1]
    n_parts = 1 + is_cast + n_spare
    parts = [logits.new_empty(shape, dtype=options.dtype) for _ in range(n_parts)]
    for start in range(0, len(logits), n_rows):
        rows = logits[start : start + n_rows]
        at = slice(start, start + len(rows))
        log_p, *spare = (part[: len(rows)] for part in parts)
        words.add_(sum_of_words(rows))
        if is_cast:
            rows = spare[0].copy_(rows)
        log_softmax_into(rows, 1, False, out=log_p)
        losses[at], _ = nll_loss(log_p, labels[at], None, 0, options.ignore_index)
        yield at, log_p, *spare


def _raise_if_edited(
    saved: Sequence[torch.Tensor], again: Sequence[torch.Tensor]
) -> None:
    """Raise a RecomputationError where the logits are not what they were.

    An accelerator is asked when the backward has ended, so that it has work until then.
    While it records a graph the host cannot wait, and no host edits anything.
    """

    def check() -> None:
        if bool(flag):
            raise RecomputationError(_EDITED.format(instead=_INSTEAD))

    losses, words = map(different_bits, saved, again)
    flag = losses | words
    if isinstance(flag, bool):
        check()
        return
    queue_callback(check)


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Count the holders of a tensor, of its base if it has one, and their storage."""
    base, storage = base_of(tensor), tensor.untyped_storage()
    counts = [storage_users(storage_key(storage)), getrefcount(storage)]
    for each in [tensor] if base is None else [tensor, base]:
        counts += getrefcount(each), getweakrefcount(each), tensor_users(each)
    return tuple(counts)


@functools.cache
def _sole_holders() -> frozenset[tuple[int, ...]]:
    """Return the counts of a sole holder, of whole tensors and of views.

    None at all where torch does not count a tensor's owners.
    """

    def count() -> frozenset[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        for is_view in (False, True):
            made = torch.ones(2, 2, requires_grad=True) * 1.0
            if tensor_users(made) == 0:
                break
            whole_or_view = made.flatten() if is_view else made
            loss = _CountHolders.apply(whole_or_view, seen)  # type: ignore[no-untyped-call]
            del whole_or_view
            del made
            loss.backward()
        return frozenset(seen)

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(count).result()


class _CountHolders(torch.autograd.Function):
    """Saves a tensor, and counts its holders in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        ctx.seen = seen
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (tensor,) = ctx.saved_tensors
        ctx.seen.append(_holders(tensor))
        return torch.zeros_like(tensor), None


_Tensor: Any = torch.Tensor
_VIEWS = _Tensor.contiguous, _Tensor.flatten, _Tensor.reshape, _Tensor.view
_PLACES = _Tensor.shape.__get__, _Tensor.device.__get__


class LateUpcast(torch.Tensor):
    """Logits whose cast to float32 waits until an operator needs all of them.

    Cross-entropy casts some rows at a time. For all other operators these are the
    logits, cast if `is_cast`. Made by `late`.
    """

    plain: torch.Tensor
    """The logits before the cast."""
    is_cast: bool
    """Whether the logits are to be float32."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what the loss function calls."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, LateUpcast):
            plain, rest = first.plain, args[1:]
            if func is F.cross_entropy:
                cast = torch.float32 if first.is_cast else None
                return cross_entropy(plain, *rest, **kwargs, cast=cast)
            if func is torch.Tensor.float and not kwargs:
                return late(plain, is_cast=True)
            if func in _VIEWS:
                return late(func(plain, *rest, **kwargs), is_cast=first.is_cast)
            if func in _PLACES:
                return func(plain)
        args, kwargs = pytree.tree_map_only(LateUpcast, _read, (args, kwargs))
        return func(*args, **kwargs)


def _read(logits: LateUpcast) -> torch.Tensor:
    return logits.plain.float() if logits.is_cast else logits.plain


def late(logits: torch.Tensor, *, is_cast: bool = False) -> LateUpcast:
    """Return logits whose cast to float32 is delayed, for a loss.

    Args:
        logits: A tensor of torch's own class, or a parameter.
        is_cast: Whether the logits are to be float32.
    """
    made = logits.as_subclass(LateUpcast)
    made.plain, made.is_cast = logits, is_cast
    return made
