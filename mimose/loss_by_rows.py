"""Cross-entropy by rows of logits: torch's loss and gradients to the last bit.

Plain cross-entropy holds up to six more tensors of the logits' size: a copy in float32,
its log-softmax and two gradients. Rows do not depend on each other, so all of these are
made here for a chunk of rows at a time, and made again in backward. Losses of
transformers' models go this way in steps whose budget asks for it
(`mimose.runtime.loss_choice`).

Note: [Rows]
A row's log-softmax and gradient have the same bits in any chunk, as long as the kernel
finds the row at a like address: vectorised kernels begin at a multiple of 16 bytes, and
so does each chunk. The sum over all rows is left to the plain operator, which gets
of one class, the label's: another order would round otherwise.

Note: [Edits]
Plain cross-entropy has saved its log-softmax, so an edit of the logits before the
backward does it no harm. Here the logits are read again. Autograd counts edits of
tensors, but not those by ``.data`` or by an array of numpy's. So the sum of the logits'
words is saved, and each row's loss, which another order of the words would change.

Note: [Sole holder]
The gradient takes the memory of the logits where the backward alone holds them. Names
of the user's count on the tensor's Python object, nodes of the graph on its C++ half,
views and aliases on its storage; weak references are counted, too. What these counts
are for a sole holder depends on torch and Python, so it is seen once on a small tensor,
in a separate thread, where no hooks or modes of the user's run. With any other counts
the logits stay as they are.
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
from torch.autograd import forward_ad

from mimose.exceptions import MimoseError, RecomputationError
from mimose.tensors import different_bits, sum_of_words
from mimose.torch_private import (
    base_of,
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
"""Smaller logits are left to the plain function: a call of an operator costs as much as
its work."""
_CHUNK_BYTES = {"cpu": 2**21}
"""Of a chunk of rows, by device: on a CPU small enough for a cache, ..."""
_LARGE_CHUNK_BYTES = 2**26
"""... elsewhere large enough that launching kernels does not take longer than they."""
_VECTOR_BYTES = 16
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
"""Each with the number that torch's operators have for it."""
_IGNORED = -100
"""The label of ignored rows where only the label's class is left: never a class."""
_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_NO_GRAPH = (
    "a loss that goes by rows cannot go backward with create_graph=True, as a gradient "
    "penalty asks for: {instead}"
)
_EDITED = (
    "logits (or their labels) were edited between a loss that goes by rows and its "
    "backward, which reads them again: zero this step's gradients and edit a copy "
    "(logits.detach().clone()), or edit them after the backward; or {instead}"
)
_INSTEAD = (
    "take torch.nn.functional.cross_entropy in place of mimose.cross_entropy, and in a "
    "session of a model of transformers a model.loss_function of your own"
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
    takes their place where no other code holds them. It costs one log-softmax more.

    Where rows alone do not give the same bits, the plain function does the work: with
    class weights, label smoothing, probabilities as targets or more dimensions, inside
    of transforms of `torch.func` and of compiled code, and on logits of less than a
    MiB.

    The logits may not be edited between the loss and its backward, which plain
    cross-entropy allows, nor the loss go backward with ``create_graph=True``.

    ``torch.nn.functional.linear_cross_entropy`` with its ``options`` (torch 2.13) never
    makes all logits. It needs less than this, and changes the last bits.

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
        MimoseError: In a backward with ``create_graph=True``.
        RecomputationError: In a backward, where the logits were edited meanwhile.
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


# ------------------------------------------------------------------ chunks of rows


class _Options(NamedTuple):
    """What a loss is asked to be."""

    reduction: int
    ignore_index: int
    dtype: torch.dtype
    """In which the loss is computed; the logits' own, or a wider one."""


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
    module = torch.get_device_module(flag.device)
    # Backends that record no graphs have no such function; bool() is False.
    if not getattr(module, "is_current_stream_capturing", bool)():
        queue_callback(check)


# -------------------------------------------------- who holds the logits


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Count who holds a tensor, its base if it has one, and their storage."""
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
    """Saves a tensor, and counts in backward who holds it."""

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


# -------------------------------------------------- losses of transformers' models

_Tensor: Any = torch.Tensor
_VIEWS = _Tensor.contiguous, _Tensor.flatten, _Tensor.reshape, _Tensor.view
_PLACES = _Tensor.shape.__get__, _Tensor.device.__get__


class LateUpcast(torch.Tensor):
    """Logits whose cast to float32 waits for whoever needs all of it.

    Cross-entropy does not: it casts some rows at a time. To all others these are the
    logits, cast if that was asked for. Made by `late`.
    """

    plain: torch.Tensor
    """The logits, not cast."""
    is_cast: bool
    """Whether float32 was asked for."""

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
    """Return logits as whoever computes a loss is to see them.

    Args:
        logits: Torch's own, or a parameter.
        is_cast: Whether float32 was asked for.
    """
    made = logits.as_subclass(LateUpcast)
    made.plain, made.is_cast = logits, is_cast
    return made
