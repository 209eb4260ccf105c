"""A batch in micro-batches that each fit, and together take least time.

Note: [Which columns count]
Rows of a batch are padded to one length. A mask, the given lengths, and labels
that are not ignored say which columns of a row count; a micro-batch has the columns in
which that row counts. What is padded alike is cut alike. Targets of a model
with a decoder, which have another length, are a separate sequence.

Columns on the left are cut only where that moves no position: where positions are
given, or are relative (rotary). A learned embedding of positions would read other rows.

Note: [The split]
Rows are sorted by length, and micro-batches are runs of them. How many padded elements
fit, and what they take, is asked of the session's forecast at a few lengths, and read
off between them; a dynamic programme over all runs finds the split of least seconds.
The forecast at a length serves until twice as many steps have run. Each micro-batch is
asked for itself before it runs: where one does not fit, fewer elements may stand there,
and the split is made anew.

What is not known yet has to be tried: the shortest row, and then a few times what has
run, as long as so many times its memory is within the budget. The split is lazy: what
is left of the batch is split anew once more is known.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import nn

from mimose.budget import format_bytes
from mimose.distributed import ddp_around, most_of_ranks, n_ranks, waiting_group
from mimose.exceptions import InfeasibleBudgetError, MimoseError
from mimose.inputs.sharding import parallel_shares

if TYPE_CHECKING:
    from mimose.forecast import Forecast, Forecasts
    from mimose.runtime.engine import Engine

Batch = TypeVar("Batch")
Loss: TypeAlias = "str | Callable[[Any], Any]"
Lengths: TypeAlias = "Sequence[int] | Mapping[str, Sequence[int]] | None"
_Ints: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]

_log = logging.getLogger(__name__)

_BY_ROWS = (
    "mimose: micro_batches() takes the loss for a mean over rows, and from %d to %d "
    "labels of a row count: where it is a mean over all of them, as models of "
    "transformers return it, give loss='tokens'"
)
_IGNORED = -100
"""The label that losses ignore."""
_MASKS = ("attention_mask", "decoder_attention_mask")
_ROWS = -1
"""In place of a sequence: a dimension that is the batch's rows."""
_GROWTH = 4.0
"""How many times what has run may be tried where nothing is known."""
_MOST_RAN = 32
"""Micro-batches remembered for that."""
_MOST_KNOTS = 256
_KNOTS = 3
"""Lengths at which the forecast is asked."""
_SHARES = np.array([0.0, 0.125, 0.25, 0.5, 1.0])
"""Of what fits there, at which it is asked for seconds."""
_OCTAVE = 4
"""Lengths asked for, between one and its double: forecasts of earlier batches serve."""
_FIXED = 0.05
"""A micro-batch's fixed share of the largest one's time, until seconds are known."""
_SHRINK = 0.9


class Rows(NamedTuple):
    """What a batch's rows are: Note: [Which columns count]."""

    n: int
    sizes: tuple[int, ...]
    """Columns of each sequence, padding included."""
    begins: _Ints
    """(n, sequences) the first column that counts."""
    ends: _Ints
    """(n, sequences) behind the last."""
    axes: Mapping[str, Mapping[int, int]]
    """By a tensor's path, what its dimensions are: rows, or which sequence."""

    def window(self, rows: _Ints) -> list[tuple[int, int]]:
        """Return the columns of each sequence in which some of these rows count."""
        begins, ends = self.begins[rows].min(axis=0), self.ends[rows].max(axis=0)
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def widths(self, rows: _Ints) -> list[int]:
        """Return how many columns of each sequence that are."""
        return [end - begin for begin, end in self.window(rows)]


# ------------------------------------------------------------------- reading a batch


def read_rows(batch: Any, lengths: Lengths, model: nn.Module) -> Rows:
    """Find a batch's rows, and which columns of them count.

    Args:
        batch: Tensors in mappings, lists and tuples.
        lengths: By row, or by tensor and row; None for what masks tell.
        model: Its configuration tells whether it has a decoder with separate labels.

    Raises:
        TypeError: It is no batch.
        ValueError: It has no rows; a tensor has another number of them, or lengths do
            not belong to it.
    """
    told = lengths if isinstance(lengths, Mapping) else {}
    if lengths is not None and not isinstance(lengths, Mapping):
        told = {"": lengths}
    n = _n_rows(batch, told)
    if not n:
        msg = "the batch has no rows, so there is nothing to split: leave it out"
        raise ValueError(msg)
    tensors: dict[str, torch.Tensor] = {}

    def note(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            if value.shape[0] not in (1, n):
                msg = (
                    f"{path or 'the batch'} has {value.shape[0]} rows where the batch "
                    f"has {n}: what does not follow the rows cannot be split with "
                    f"them. Hand it to the model beside the batch"
                )
                raise ValueError(msg)
            tensors[path] = value
        return value

    _rebuilt(batch, "", n, note)
    axes = {path: {0: _ROWS} if len(t) == n else {} for path, t in tensors.items()}
    begins: list[_Ints] = []
    ends: list[_Ints] = []
    sizes: list[int] = []
    for paths, counts, is_target in _sequences(tensors, n, told, model):
        begin, end = _span(counts)
        is_whole = is_target or not _may_cut_left(paths, model)
        begins.append(np.zeros_like(begin) if is_whole else begin)
        ends.append(end)
        for path in paths:
            for axis in _column_axes(path, tensors[path]):
                if tensors[path].shape[axis] == counts.shape[1]:
                    axes[path][axis] = len(sizes)
        sizes.append(int(counts.shape[1]))
    shape = n, len(sizes)
    first, behind = (np.array(each).T.reshape(shape) for each in (begins, ends))
    return Rows(n, tuple(sizes), first, behind, axes)


def _n_rows(batch: Any, told: Mapping[str, Sequence[int]]) -> int:
    if not isinstance(batch, (torch.Tensor, Mapping, list, tuple)):
        msg = (
            f"a batch is a mapping, a tuple or a list of tensors, got "
            f"{type(batch).__name__}; of another object give its fields, vars(batch)"
        )
        raise TypeError(msg)
    for own in told.values():
        return len(own)
    values: list[Any] = [batch]
    if not isinstance(batch, torch.Tensor):
        values = [*(batch.values() if isinstance(batch, Mapping) else batch)]
    sized: list[Any] = [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
    for value in sized or [v for v in values if isinstance(v, (list, tuple))]:
        return len(value)
    for value in values:
        if isinstance(value, Mapping):
            return _n_rows(value, told)
    msg = "the batch has no tensor with rows, so there is nothing to split"
    raise TypeError(msg)


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _column_axes(path: str, tensor: torch.Tensor) -> range:
    """Return which dimensions may be columns: of masks all behind the rows."""
    return range(1, tensor.dim() if _name(path).endswith("mask") else 2)


def _sequences(
    tensors: Mapping[str, torch.Tensor],
    n: int,
    told: Mapping[str, Sequence[int]],
    model: nn.Module,
) -> list[tuple[list[str], NDArray[np.bool_], bool]]:
    """Find what is padded alike.

    Returns:
        The tensors; (n, columns) which count; whether it is a decoder's.

    Raises:
        ValueError: It is not known which lengths are a tensor's.
    """
    wide = {path: tensor for path, tensor in tensors.items() if tensor.dim() > 1}
    flat = [path for path, tensor in wide.items() if tensor.dim() == 2]
    masks = [path for path in flat if _name(path) in _MASKS]
    if told and not wide:
        msg = "lengths: no tensor of the batch has columns, so nothing can be cut"
        raise ValueError(msg)
    sources = [path for path in wide if not _name(path).startswith("decoder_")]
    first = next(iter([*masks, *sources, *wide]), "")
    lengths = {
        _path_of(name, wide) if name else first: np.asarray(own)
        for name, own in told.items()
    }
    is_pair = _is_pair(model) or len(sources) < len(wide)

    def size(path: str) -> int:
        return wide[path].shape[1]

    def is_target(path: str) -> bool:
        if _name(path) != "labels" or path not in flat:
            return _name(path).startswith("decoder_")
        return is_pair or size(path) != size(first)

    def are_alike(one: str, other: str) -> bool:
        sizes = {wide[other].shape[axis] for axis in _column_axes(other, wide[other])}
        return size(one) in sizes and is_target(one) == is_target(other)

    found: dict[str, list[str]] = {path: [path] for path in lengths}
    for path in [*masks, *filter(is_target, flat)]:
        if not any(are_alike(anchor, path) for anchor in found):
            found[path] = [path]
    for path in wide:
        alike = [anchor for anchor in found if are_alike(anchor, path)]
        if path not in found and len(alike) > 1:
            msg = (
                f"{path} has as many columns as {' and '.join(alike)}, which have "
                f"other lengths: pass its lengths, lengths={{{path!r}: ...}}"
            )
            raise ValueError(msg)
        if path not in found and alike:
            found[alike[0]].append(path)
    return [
        (
            paths,
            _counting([wide[path] for path in paths], paths, n, lengths),
            is_target(anchor),
        )
        for anchor, paths in found.items()
        if any(_name(path) not in _MASKS for path in paths)
    ]


def _is_pair(model: nn.Module) -> bool:
    """Whether it is, or wraps, an encoder with a decoder; one alone may say so, too."""
    return any(
        getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        and hasattr(module, "decoder")
        for module in model.modules()
    )


def _path_of(name: str, wide: Mapping[str, torch.Tensor]) -> str:
    """Return the path of the tensor that lengths are given for."""
    path = name.removesuffix(".1")
    if path not in wide:
        msg = f"lengths: the batch has no {path!r} with columns, but {', '.join(wide)}"
        raise ValueError(msg)
    return path


def _counting(
    tensors: Sequence[torch.Tensor],
    paths: Sequence[str],
    n: int,
    told: Mapping[str, NDArray[Any]],
) -> NDArray[np.bool_]:
    """Return (n, columns) which count in tensors that are padded alike."""
    size = tensors[0].shape[1]
    counts, labelled = np.zeros((2, n, size), bool)
    is_told = False
    for path, tensor in zip(paths, tensors, strict=True):
        own, name = told.get(path), _name(path)
        if own is not None:
            is_fine = own.shape == (n,) and own.dtype.kind in "iu"
            if not is_fine or own.min() < 0 or own.max() > size:
                msg = (
                    f"lengths: {path or 'the batch'} has {n} rows of {size} columns, "
                    f"so give {n} integers from 0 to {size}, got {own.tolist()[:8]}"
                )
                raise ValueError(msg)
            counts |= np.arange(size) < own[:, None]
            is_told = True
        elif tensor.shape == (n, size) and name in (*_MASKS, "labels"):
            shown = (tensor != (_IGNORED if name == "labels" else 0)).cpu().numpy()
            counts |= shown
            labelled |= shown & (name == "labels")
            is_told = True
    if not is_told:
        return ~counts
    # A label behind padding is predicted from that: such a row counts as a whole.
    begins = counts.argmax(axis=1)
    counts[(begins > 0) & labelled[np.arange(n), begins]] = True
    if not told.keys() & paths:  # without any column attention goes to all alike
        counts[~counts.any(axis=1)] = True
    return counts


def _span(counts: NDArray[np.bool_]) -> tuple[_Ints, _Ints]:
    """Return (n,) the first column that counts, and (n,) the one behind the last."""
    ends = counts.shape[1] - counts[:, ::-1].argmax(axis=1)
    begins, is_empty = counts.argmax(axis=1), ~counts.any(axis=1)
    ends[is_empty] = 1
    return begins, ends


def _may_cut_left(paths: Sequence[str], model: nn.Module) -> bool:
    if any(_name(path) == "position_ids" for path in paths):
        return True
    return any("rotary" in type(m).__name__.lower() for m in model.modules())


# ------------------------------------------------------------------- taking rows


def _rebuilt(value: Any, path: str, n: int, take: Callable[[str, Any], Any]) -> Any:
    """Return a batch with what follows its rows replaced.

    Args:
        value: The batch, or a part of it.
        path: Where that is in it.
        n: Rows.
        take: What replaces a tensor, or a list or an array with an item a row.
    """
    at = f"{path}." if path else ""
    if isinstance(value, torch.Tensor):
        return take(path, value)
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = _rebuilt(item, f"{at}{key}", n, take)
        return made
    if isinstance(value, np.ndarray):
        return take(path, value) if value.ndim and len(value) == n else value
    if not isinstance(value, (list, tuple)):
        return value
    are_batches = all(
        isinstance(v, torch.Tensor) and v.shape[:1] == (n,) for v in value
    )
    if path and len(value) == n and not are_batches:
        return take(path, value)
    items = [_rebuilt(item, f"{at}{i}", n, take) for i, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def take_rows(batch: Batch, rows: Rows, chosen: _Ints) -> Batch:
    """Return some rows of a batch, without columns that are padding in all of them.

    Args:
        batch: The batch.
        rows: What `read_rows` said of it.
        chosen: (k,) their places.
    """
    window, index = rows.window(chosen), chosen.tolist()

    def take(path: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[index]
        if not isinstance(value, torch.Tensor):
            return type(value)([value[i] for i in index])
        for axis, role in rows.axes.get(path, {}).items():
            if role != _ROWS:
                begin, end = window[role]
                value = value.narrow(axis, begin, end - begin)
        if _ROWS in rows.axes.get(path, {}).values():
            value = value[torch.tensor(index, device=value.device)]
        return value

    made: Batch = _rebuilt(batch, "", rows.n, take)
    return made


# ------------------------------------------------------------------- weights


def _counter(loss: Loss, batch: Any, rows: Rows, model: nn.Module) -> _Floats | None:
    """Return (n,) what each row counts for in a mean; None where a function says it.

    Raises:
        ValueError: It is no such word, or nothing counts.
    """
    if callable(loss):
        return None
    if loss == "rows":
        return np.ones(rows.n)
    if loss != "tokens":
        msg = f"loss must be 'rows', 'tokens' or a function of a batch, got {loss!r}"
        raise ValueError(msg)
    counts = _label_counts(batch, rows, model)
    if counts is None:
        msg = (
            "loss='tokens' counts the batch's labels, and it has none: give a function "
            "that counts what the loss is a mean over, in a batch of whatever rows"
        )
        raise ValueError(msg)
    if not counts.any():
        msg = f"no label of the batch's {rows.n} rows counts, so its mean is no number"
        raise ValueError(msg)
    return counts


def _label_counts(batch: Any, rows: Rows, model: nn.Module) -> _Floats | None:
    """Return (n,) how many labels of each row count; None where it has no labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.shape[:1] != (rows.n,):
        return None
    is_shifted = labels.dim() > 1 and _shifts(model)
    counted = (labels[..., 1:] if is_shifted else labels) != _IGNORED
    counts: _Floats = counted.reshape(rows.n, -1).sum(1).cpu().numpy().astype(float)
    return counts


def _shifts(model: nn.Module) -> bool:
    """Whether a model of transformers predicts each label from the tokens before it."""
    if _is_pair(model):
        return False
    for module in model.modules():
        kind, name = getattr(module, "loss_type", None), type(module).__name__
        if kind in ("ForCausalLM", "ForConditionalGeneration"):
            return True
        if name.endswith("LMHeadModel") and not name.endswith("WithLMHeadModel"):
            return True
    return False


# ------------------------------------------------------------------- the split


def _raise_if_batch_norm(model: nn.Module) -> None:
    """Make sure that no layer mixes rows.

    Raises:
        MimoseError: Batch norm does, in training mode.
    """
    kind = nn.modules.batchnorm._BatchNorm
    found = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, kind) and module.training
    ]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        msg = (
            f"{', '.join(found[:3])}{more}: batch norm in training mode normalises by "
            f"the mean of all rows, so a batch in parts has other gradients. Put it in "
            f"evaluation mode, replace it (group norm), or train the batch whole"
        )
        raise MimoseError(msg)


class Splitter:
    """Splits a session's batches, and remembers what has run.

    Args:
        engine: The session's parts.
        forecasts: What steps to come would take.
    """

    def __init__(self, engine: Engine, forecasts: Forecasts) -> None:
        self._engine, self._forecasts = engine, forecasts
        self._ran: deque[tuple[int, int, float]] = deque(maxlen=_MOST_RAN)
        """Rows and columns of micro-batches, and what memory grew by."""
        self._knots: LRUCache[tuple[int, ...], tuple[int, float, _Floats]]
        self._knots = LRUCache(_MOST_KNOTS)
        """Until which step; the most elements, and what shares of them take."""
        self._roles: dict[str, int] = {}
        """By the name of a size of the model's, what it is, as seen in a step."""
        self._wrapper: Callable[[], Any] | None = None
        self._has_warned = False

    def split(
        self, model: nn.Module, batch: Batch, lengths: Lengths, loss: Loss
    ) -> Iterator[tuple[Batch, float]]:
        """Check a batch, and return its micro-batches; see `Session.micro_batches`."""
        _raise_if_batch_norm(model)
        rows = read_rows(batch, lengths, model)
        counts = _counter(loss, batch, rows, model)
        if loss == "rows" and not self._has_warned:
            own = _label_counts(batch, rows, model)
            if own is not None and own.min() < own.max():
                self._has_warned = True
                _log.warning(_BY_ROWS, own.min(), own.max())
        return self._run(model, batch, rows, loss, counts)

    def _run(
        self,
        model: nn.Module,
        batch: Batch,
        rows: Rows,
        loss: Loss,
        counts: _Floats | None,
    ) -> Iterator[tuple[Batch, float]]:
        def count(part: Any, chosen: _Ints) -> float:
            if counts is not None:
                return float(counts[chosen].sum())
            assert callable(loss)
            return float(loss(part))

        whole = count(batch, np.arange(rows.n))
        order = _sorted(rows.ends - rows.begins)
        if counts is not None:
            order = order[counts[order] > 0]  # a mean over none of them is no number
        wrapper, told = self._ddp(model), 0.0
        for chosen, is_last, is_again in self._parts(model, rows, order):
            part = take_rows(batch, rows, chosen)
            weight = 0.0 if is_again else count(part, chosen) / whole
            told += weight
            _check_weight(weight, told, is_last=is_last, is_again=is_again)
            n_begun = self._engine.steps.n_begun
            with nullcontext() if wrapper is None or is_last else wrapper.no_sync():
                yield part, weight
            if self._engine.steps.n_begun > n_begun:
                self._note(rows, chosen)
            elif wrapper is not None and not is_last:
                msg = (
                    "the next micro-batch was asked for before this one was trained: "
                    "ranks would reduce gradients in each. Train each of "
                    "micro_batches() within the loop over them"
                )
                raise MimoseError(msg)

    def _ddp(self, model: nn.Module) -> Any:
        """Return the wrapper that reduces the model's gradients; None without one."""
        if n_ranks() < 2:
            return None
        if self._wrapper is None or self._wrapper() is None:
            found = ddp_around(model)
            self._wrapper = nullcontext if found is None else weakref.ref(found)
        return None if self._wrapper is nullcontext else self._wrapper()

    def _parts(
        self, model: nn.Module, rows: Rows, order: _Ints
    ) -> Iterator[tuple[_Ints, bool, bool]]:
        """Yield rows, whether they are the last, and whether they come again."""
        group = waiting_group(model, self._engine.ranks)
        if group is not None:
            shared = parallel_shares(model)
            if shared:
                msg = (
                    f"{next(iter(shared))} is shared by tensor parallelism, whose "
                    f"ranks run the same rows together: micro_batches() splits each "
                    f"rank's by itself. Split such batches alike on all ranks"
                )
                raise MimoseError(msg)
            found: list[_Ints] = []

            def count() -> int:
                found.extend(chosen for chosen, _ in self._walk(rows, order))
                return len(found)

            most, n = most_of_ranks(count, group), len(found)
            found += [min(found, key=len)] * (most - n)
            for at, chosen in enumerate(found):
                yield chosen, at == most - 1, at >= n
            return
        for chosen, is_last in self._walk(rows, order):
            yield chosen, is_last, False

    def _walk(self, rows: Rows, order: _Ints) -> Iterator[tuple[_Ints, bool]]:
        """Yield rows, and whether they are the last."""
        self._engine.driver.renew_budget()  # a window begins with the first part
        ends: list[int] = []
        while len(order):
            # A row by itself runs in any case: the longest was asked for.
            if not ends or (ends[0] > 1 and not self._fits(rows, order[: ends[0]])):
                ends = self._split(rows, order)
            end, *rest = ends
            chosen, order = order[:end], order[end:]
            ends = [each - end for each in rest]
            yield chosen, not len(order)

    # ------------------------------------------------------------------ what is known

    def _shape(self, rows: Rows, n: int, widths: Sequence[int]) -> dict[str, int]:
        """Return the model's sizes that a micro-batch decides, by name; {}: none."""
        last = self._engine.snapshot.typical
        if last is None:
            return {}
        own: dict[int, tuple[str, int]] = {}
        for path, axes in rows.axes.items():
            for axis, role in axes.items():
                column = last[1].column(f"{path}.{axis}")
                if column is not None:
                    own.setdefault(column, (f"{path}.{axis}", role))
        roles = dict(own.values())
        roles = roles if _ROWS in roles.values() else self._roles
        return {k: n if role == _ROWS else widths[role] for k, role in roles.items()}

    def _ask(self, rows: Rows, n: int, widths: Sequence[int]) -> Forecast | None:
        shape = self._shape(rows, n, widths)
        if not shape:
            return None
        try:
            return self._forecasts.ask(shape, None, True)
        except MimoseError:  # nothing is known, or no plan is made for such steps
            return None

    def _fits(self, rows: Rows, chosen: _Ints) -> bool | None:
        """Whether rows are known to fit; None where nothing is known."""
        found = self._ask(rows, len(chosen), rows.widths(chosen))
        return None if found is None else found.fits

    def _may_run(self, rows: Rows, n: int, widths: Sequence[int]) -> bool:
        """Whether so many rows fit, or may be tried."""
        found = self._ask(rows, n, widths)
        if found is not None and found.fits is not None:
            return found.fits
        budget_bytes = self._engine.memory_limit.budget_bytes
        memory = self._engine.driver.memory_now()
        room = (budget_bytes - memory.start_bytes) / memory.reserved_ratio
        columns = sum(widths)
        for n_ran, wide, growth in self._ran:
            # By columns it grows by their square at the most, as attention's scores do.
            times = n / n_ran * max(1.0, columns / max(1, wide)) ** 2
            if times <= _GROWTH and times * growth <= room:
                return True
        return n == 1

    def _note(self, rows: Rows, chosen: _Ints) -> None:
        """Record what a micro-batch took, and what its sizes are called."""
        n, widths = len(chosen), rows.widths(chosen)
        record = self._engine.records[-1] if self._engine.records else None
        if record is not None:
            peak = record.observed_peak_bytes or record.start_bytes
            self._ran.append((n, sum(widths), float(peak - record.start_bytes)))
        last = self._engine.describer.last
        if last is None or n in widths:
            return
        roles = {n: _ROWS, **{w: i for i, w in enumerate(widths)}}
        found = {
            last[1].column(name): (name, roles[size])
            for name, size in zip(last[1].names, last[0].sizes, strict=False)
            if size in roles and name.endswith(".0") == (roles[size] == _ROWS)
        }
        self._roles = dict(found.values())

    # ------------------------------------------------------------------ choosing

    def _split(self, rows: Rows, order: _Ints) -> list[int]:
        """Return where micro-batches end: Note: [The split].

        Returns:
            The ends; that of the first one alone where it is to be tried.

        Raises:
            InfeasibleBudgetError: The longest row does not fit by itself.
        """
        longest = self._ask(rows, 1, _rounded(rows.widths(order[-1:])))
        if longest is None or longest.fits is None:
            return [self._tried(rows, order)]
        if not longest.fits:
            self._raise_if_too_long(rows, order[-1:])
        begins, ends = rows.begins[order], rows.ends[order]
        elements, costs = self._table(rows, begins, ends)
        most = elements.copy()
        while True:
            cuts = _least(begins, ends, most, elements, costs)
            first, widths = order[: cuts[0]], rows.widths(order[: cuts[0]])
            if len(first) == 1:
                self._raise_if_too_long(rows, first)
            if len(first) == 1 or self._may_run(rows, len(first), widths):
                return cuts
            self._knots.clear()
            near = most[: 2 * len(first)]
            near[:] = np.minimum(near, _SHRINK * _elements(len(first), widths))

    def _tried(self, rows: Rows, order: _Ints) -> int:
        """Return how many rows may be tried, the shortest first."""
        n = 1
        while n < len(order):
            more = order[: 2 * n]
            if not self._may_run(rows, len(more), rows.widths(more)):
                break
            n = len(more)
        return n

    def _table(self, rows: Rows, begins: _Ints, ends: _Ints) -> tuple[_Floats, _Floats]:
        """Return what is asked of the forecast, by row: Note: [The split].

        Returns:
            (m,) the most elements of a micro-batch that ends there; (m, shares) what
            shares of it take.
        """
        m, most, costs = len(begins), [], []
        places = np.unique(np.linspace(0, m - 1, _KNOTS).round().astype(int))
        for place in places:
            near = slice(max(0, place - m // _KNOTS), place + 1)
            spans = ends[near].max(0) - begins[near].min(0)
            widths = _rounded(spans.tolist())
            elements, cost = self._knot(rows, widths)
            most.append(elements)
            costs.append(cost)
        at = np.arange(m)
        by_share = [np.interp(at, places, column) for column in np.array(costs).T]
        return np.interp(at, places, most), np.stack(by_share, axis=1)

    def _knot(self, rows: Rows, widths: Sequence[int]) -> tuple[float, _Floats]:
        """Return the most elements of rows of a length, and what shares of it take."""
        n_steps = self._engine.steps.n_begun
        key = self._engine.memory_limit.budget_bytes, rows.n, *widths
        until, elements, costs = self._knots.get(key, (0, 0.0, np.empty(0)))
        if n_steps < until:
            return elements, costs
        shape, n = self._shape(rows, 1, widths), 1
        name = next(name for name in shape if name.endswith(".0"))
        with suppress(MimoseError):
            n = max(1, self._forecasts.largest(shape, name, None, rows.n, True))
        some = np.unique(np.ceil(n * _SHARES[1:])).astype(int)
        sizes = np.array([_elements(int(each), widths) for each in some])
        told = [self._ask(rows, int(each), widths) for each in some]
        seconds = [f.seconds for f in told if f is not None and f.seconds is not None]
        known = len(seconds) == len(some)
        cost = np.array(seconds) if known else sizes + _FIXED * sizes[-1]
        first = cost[0]
        if len(some) > 1:  # of no rows at all
            first -= sizes[0] * (cost[1] - cost[0]) / (sizes[1] - sizes[0])
        elements, cost = float(sizes[-1]), np.r_[max(0.0, first), cost]
        costs = np.interp(_SHARES * elements, np.r_[0.0, sizes], cost)
        self._knots[key] = 2 * n_steps, elements, costs
        return elements, costs

    def _raise_if_too_long(self, rows: Rows, alone: _Ints) -> None:
        """Make sure that a row fits by itself.

        But for the margin it may: its step is seen, and what that takes decides.
        """
        widths = rows.widths(alone)
        found = self._ask(rows, 1, widths)
        peak = None if found is None else found.peak_bytes
        if found is None or peak is None or peak <= found.budget_bytes:
            return
        if self._engine.checks.warns:
            return
        start = float(self._engine.meter.live_bytes())
        length = f" of {' and '.join(map(str, widths))} columns" if widths else ""
        raise InfeasibleBudgetError(
            found.budget_bytes,
            peak,
            {"what is held": start, "the row, everything recomputed": peak - start},
            f"Row {alone[0]} of the batch{length} does not fit by itself. Raise the "
            f"budget to at least {format_bytes(peak)}, or leave such rows out.",
        )


def _check_weight(weight: float, told: float, *, is_last: bool, is_again: bool) -> None:
    """Make sure that a user's function counts what adds up.

    Raises:
        ValueError: It does not.
    """
    if is_again or (
        weight > 0.0 and (not is_last or math.isclose(told, 1.0, rel_tol=1e-6))
    ):
        return
    what = f"adds up to {told:.6g} of that" if is_last else f"is {weight:.6g} of that"
    msg = (
        f"loss: what the function counts in a part of the batch {what} of the whole: "
        f"it has to count what the loss is a mean over, such as rows or tokens, which "
        f"is above 0 in each part and adds up; leave rows out of which nothing counts"
    )
    raise ValueError(msg)


def _elements(n: int, widths: Sequence[int]) -> float:
    return float(n * (sum(widths) or 1))


def _rounded(widths: Sequence[int]) -> list[int]:
    """Return the next lengths among those that are asked for."""
    steps = [math.ceil(_OCTAVE * math.log2(width) - 1e-9) for width in widths]
    return [math.ceil(2.0 ** (step / _OCTAVE)) for step in steps]


def _sorted(spans: _Ints) -> _Ints:
    """Return the order of rows; of two sequences by the first one's rounded length.

    Rows of about one source length then go by their targets'.
    """
    n, n_sequences = spans.shape
    if not n_sequences:
        return np.arange(n)
    keys = spans.astype(np.float64).T
    if n_sequences > 1:
        keys[0] = np.ceil(_OCTAVE * np.log2(keys[0]))
    return np.lexsort(keys[::-1])


def _least(
    begins: _Ints, ends: _Ints, most: _Floats, elements: _Floats, costs: _Floats
) -> list[int]:
    """Return where runs of rows end that take least in sum.

    Args:
        begins: (m, sequences) the first column of each row.
        ends: (m, sequences) behind its last.
        most: (m,) elements of a run that ends there.
        elements: (m,) of which `costs` tells shares.
        costs: (m, shares) what they take.
    """
    m = len(begins)
    shortest = np.maximum((ends - begins).sum(1), 1).min()
    n = np.arange(1, min(m, int(most.max() // shortest) + 1) + 1)
    rows = np.arange(1, m + 1)[:, None] - n  # of runs that end there, the last first
    is_none, rows = rows < 0, np.maximum(rows, 0)
    last = np.maximum.accumulate(ends[rows], axis=1)
    widths = last - np.minimum.accumulate(begins[rows], axis=1)
    size = n * np.maximum(widths.sum(2), 1)
    share = size / elements[:, None]
    at = np.clip(np.searchsorted(_SHARES, share) - 1, 0, len(_SHARES) - 2)
    below, above = (np.take_along_axis(costs, at + k, axis=1) for k in (0, 1))
    between = (share - _SHARES[at]) / (_SHARES[at + 1] - _SHARES[at])
    cost = below + between * (above - below)
    cost[is_none | ((size > most[:, None]) & (n > 1))] = np.inf
    best, came_from = np.zeros(m + 1), np.zeros(m + 1, dtype=np.intp)
    for end in range(1, m + 1):
        total = cost[end - 1, : min(end, len(n))] + best[end - n[:end]]
        k = int(total.argmin())
        best[end], came_from[end] = total[k], end - n[k]
    cuts = []
    while m:
        cuts.append(m)
        m = int(came_from[m])
    return cuts[::-1]
