"""Cross-entropy by rows of logits, with the bits of torch's loss and gradients.

Plain cross-entropy holds up to six more tensors of the logits' size: a copy in float32,
its log-softmax and two gradients. Rows are independent, so this module makes all of
these for one chunk of rows at a time, and again in the backward.

Note: [Whether a loss goes by rows]
By rows a loss takes a third of the memory, but computes each log-softmax twice: 6% of a
step of Llama-1B. So the loss of a transformers' model goes by rows only if the logits,
in float32, are larger than a share of the budget, and the step does not fit with a
plain loss and nothing recomputed. The size of the logits is known before the forward,
because each label has one row.

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
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import getweakrefcount

import torch
import torch.nn.functional as F
from torch import nn

from mimose.cost.problem import Memory, fill_problem, plan_growth
from mimose.cost.trust import why_unknown
from mimose.exceptions import MimoseError, RecomputationError
from mimose.policy.plans import Plans
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
from mimose.types import BY_ROWS, StepInput

LEAST_BYTES = 2**20
"""Smaller logits use torch's function: calling an operator costs as much as its
work."""
_LEAST_LOGITS_SHARE = 1 / 32
"""Share of the budget. Smaller logits do not change a plan."""
_COPIES = 4
"""A plain loss holds at most this many more copies of the logits in float32 than a loss
by rows."""
_OWN = "_loss_function"
"""Attribute of a transformers' model for a loss function that the user has set."""
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


class LossByRows:
    """Replaces the loss function of a transformers' model, until `remove`.

    The model reads its loss function from the property `loss_function`, which can be
    set. This object calls the original function, with logits for which cross-entropy
    goes by rows, in the forward and in recomputations. Copies and pickles of the model
    have the original function.

    Args:
        module: The model.
        is_on: Returns whether the next loss goes by rows.

    Attributes:
        n_classes: The number of logits for each label.
    """

    def __init__(self, module: Any, is_on: Callable[[], bool]) -> None:
        self._module = module
        self._given = vars(module).get(_OWN)
        config = getattr(module, "config", None)
        config = getattr(config, "get_text_config", lambda: config)()
        self.n_classes = getattr(config, "vocab_size", None) or 0
        self._is_on: Callable[[], bool] = is_on
        setattr(module, _OWN, self)

    @property
    def can_go_by_rows(self) -> bool:
        """Whether the model's loss is now a function of transformers."""
        is_in_place = vars(self._module).get(_OWN) is self
        return is_in_place and _is_theirs(self._original())

    def remove(self) -> None:
        """Restore the model's loss function, unless the user has set another."""
        self._is_on, state = bool, vars(self._module)
        if state.get(_OWN) is self:
            del state[_OWN]
            if self._given is not None:
                state[_OWN] = self._given

    def _original(self) -> Any:
        """Return the function that the user has set, or the one of the class."""
        if self._given is not None:
            return self._given
        without: Any = object.__new__(type(self._module))
        state = vars(self._module).items()
        vars(without).update((name, value) for name, value in state if name != _OWN)
        return without.loss_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        original = self._original()
        is_on = not torch.compiler.is_compiling() and self._is_on()
        if is_on and _is_theirs(original):
            args = tuple(map(_by_rows, args))
            kwargs = {name: _by_rows(value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copy and pickle as the original function."""
        return operator.itemgetter(0), ((self._original(),),)


def _by_rows(value: Any) -> Any:
    is_logits = type(value) is torch.Tensor and value.is_floating_point()
    return late(value) if is_logits and value.nbytes >= LEAST_BYTES else value


def _is_theirs(function: Any) -> bool:
    name = getattr(function, "__module__", None) or ""
    return callable(function) and name.startswith("transformers.")


def _with_losses(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose loss is a function of transformers."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        takes = inspect.signature(module.forward).parameters
        if "labels" in takes and _is_theirs(getattr(module, "loss_function", None)):
            yield module


def n_labels_of(kwargs: Mapping[str, Any]) -> int:
    """Return the number of labels in a step.

    Args:
        kwargs: The keyword arguments of the model's call.
    """
    labels = kwargs.get("labels")
    return labels.numel() if isinstance(labels, torch.Tensor) else 0


class LossChoice:
    """Chooses whether a step's losses go by rows.

    Args:
        plans: Knows which steps fit with a plain loss.

    Attributes:
        losses: The model's losses that can go by rows; none in a baseline.
        is_by_rows: Whether those of the running step do.
    """

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self.losses: tuple[LossByRows, ...] = ()
        self.is_by_rows = False

    def replace_in(self, model: nn.Module) -> tuple[LossByRows, ...]:
        """Replace the model's loss functions, and return what removes that."""
        found = list(_with_losses(model))
        self.losses = tuple(LossByRows(each, lambda: self.is_by_rows) for each in found)
        return self.losses

    def forget_losses(self) -> None:
        """Free the losses, and so the model, as the session ends."""
        self.losses = ()

    def choose(
        self,
        step_input: StepInput,
        n_labels: int,
        memory: Memory,
        budget_bytes: int,
        *,
        may_be_plain: bool,
    ) -> StepInput:
        """Choose for a step that begins, and return its input.

        Args:
            step_input: The step with a plain loss.
            n_labels: The number of labels in the step.
            memory: What is held, and the budget.
            budget_bytes: The budget; 0 if the step must take as little as possible.
            may_be_plain: Whether a large loss may be a plain one.
        """
        contexts = self.contexts(
            step_input, n_labels, memory, budget_bytes, may_be_plain=may_be_plain
        )
        self.is_by_rows = contexts[0] != step_input.context
        return (
            step_input._replace(context=contexts[0]) if self.is_by_rows else step_input
        )

    def choose_least(self, n_labels: int) -> None:
        """Take as little memory as possible for a forward that runs again."""
        self.is_by_rows = self._large_logits(n_labels, 0) > 0

    def contexts(
        self,
        plain: StepInput,
        n_labels: int,
        memory: Memory,
        budget_bytes: int,
        *,
        may_be_plain: bool = True,
    ) -> list[str]:
        """Return the context of a step, and the other one that its loss allows.

        Args:
            plain: The step with a plain loss.
            n_labels: As for `choose`.
            memory: As for `choose`.
            budget_bytes: As for `choose`.
            may_be_plain: As for `choose`.
        """
        large = self._large_logits(n_labels, budget_bytes)
        if not large:
            return [plain.context]
        by_rows = plain._replace(context=plain.context + BY_ROWS)
        is_plain = may_be_plain and self._prefers_plain(plain, by_rows, large, memory)
        own, other = (plain, by_rows) if is_plain else (by_rows, plain)
        return [own.context, other.context]

    def _prefers_plain(
        self,
        step_input: StepInput,
        by_rows: StepInput,
        logit_bytes: int,
        memory: Memory,
    ) -> bool:
        """Whether a step fits with a plain loss and everything kept.

        If steps with a plain loss cannot be predicted, the same step with a loss by
        rows is: it takes less by at most four copies of the logits.

        Args:
            step_input: The step with a plain loss.
            by_rows: The same step with its loss by rows.
            logit_bytes: The bytes of its logits in float32.
            memory: What is held, and the budget.
        """
        plans = self._plans
        plain, made = plans.peek(step_input, memory), plans.peek(by_rows, memory)
        if plain is not None:
            return plain.keeps_all
        model, known, more = plans.learner.model, step_input, 0
        if why_unknown(model, step_input):
            known, more = by_rows, _COPIES * logit_bytes
        if (made is not None and not made.keeps_all) or why_unknown(model, known):
            return False
        problem = fill_problem(model, known, memory)
        actions = (model.menu.first,) * len(problem.calls)
        growth = plan_growth(model, known, problem, actions, memory.released_bytes)
        most = plans.margin.allowed(growth.bytes(memory.released_bytes))
        return most + more <= memory.headroom_bytes

    def _large_logits(self, n_labels: int, budget_bytes: int) -> int:
        """Return the bytes of a step's logits in float32; 0 if they are small."""
        least = max(LEAST_BYTES, _LEAST_LOGITS_SHARE * budget_bytes)
        found = [(4 * n_labels * loss.n_classes, loss) for loss in self.losses]
        large = (n for n, loss in found if n >= least and loss.can_go_by_rows)
        return max(large, default=0)
