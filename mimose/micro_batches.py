"""Splits a batch into micro-batches that fit the budget and take the least time.

Note: [Which columns count]
The rows of a batch are padded to one length. A column of a row counts if a mask, the
given lengths, or a label that is not ignored says so. A micro-batch has the columns in
which at least one of its rows counts. Tensors with the same padding are cut alike. The
targets of an encoder-decoder model have another length: they are a separate sequence.

Padding on the left is cut only if the batch has positions, because a model that counts
columns would see every row at other positions.

Note: [The split]
Rows are sorted by length, and a micro-batch is a run of consecutive rows. The session
forecasts at a few lengths how many padded elements fit and how many seconds they take;
between these lengths the numbers are interpolated. A dynamic program over all runs
finds the split with the fewest seconds. A forecast is used again until twice as many
steps have run. Before a micro-batch runs, it is forecast at its exact shape: if it does
not fit, the limit of elements falls there, and the rest is split again.

If the session cannot forecast yet, the split tries: first the shortest row, then a
small multiple of what has run, as long as that multiple of its memory is within the
budget. The split is lazy, so the rest of the batch uses what the first steps have
shown.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import nn

from mimose.budget import format_bytes
from mimose.distributed import (
    Ranks,
    ddp_around,
    most_of_ranks,
    n_ranks,
    waiting_group,
)
from mimose.exceptions import InfeasibleBudgetError, MimoseError
from mimose.forecast import Forecast, Forecasts
from mimose.model.sharding import parallel_shares
from mimose.records import Records
from mimose.runtime.budget import SessionBudget
from mimose.runtime.driver import Driver
from mimose.runtime.last_steps import LastSteps

Batch = TypeVar("Batch")
Loss: TypeAlias = "str | Callable[[Any], Any] | None"
Lengths: TypeAlias = "Sequence[int] | Mapping[str, Sequence[int]] | None"
_Ints: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]

_NOTHING = (
    "nothing counts in the {} rows of this batch: all labels are ignored, or the "
    "function counts 0. Other ranks wait for this one's gradients, so give each rank a "
    "batch in which something counts, or skip this batch on all ranks"
)
_IGNORED = -100
"""The label that losses ignore."""
_MASKS = ("attention_mask", "decoder_attention_mask")
_ROWS = -1
"""Marks a dimension that is the batch's rows, in place of a sequence's index."""
_GROWTH = 4.0
"""The largest multiple of a micro-batch that ran which is tried without a forecast."""
_MOST_RAN = 32
"""Micro-batches remembered for that."""
_MOST_KNOTS = 256
_KNOTS = 3
"""Lengths of a batch at which the session forecasts."""
_SHARES = np.array([0.125, 0.25, 0.5, 1.0])
"""Shares of the largest micro-batch of a length for which it forecasts seconds."""
_OCTAVE = 4
"""Distinct lengths in a factor of two, so that later batches use the same forecasts."""
_FIXED = 0.05
"""Assumed fixed time of a micro-batch, as a share of the largest one's time, until the
session forecasts seconds."""
_SHRINK = 0.9


class Rows(NamedTuple):
    """The rows of a batch: Note: [Which columns count]."""

    n: int
    begins: _Ints
    """(n, sequences) The first column that counts."""
    ends: _Ints
    """(n, sequences) One past the last column that counts."""
    axes: Mapping[str, Mapping[int, int]]
    """By a tensor's path: for each dimension the index of its sequence, or `_ROWS`."""
    columns: _Ints
    """(sequences,) The columns of the batch."""

    def window(self, rows: _Ints) -> list[tuple[int, int]]:
        """Return each sequence's columns in which at least one of these rows counts."""
        begins, ends = self.begins[rows].min(axis=0), self.ends[rows].max(axis=0)
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def widths(self, rows: _Ints) -> list[int]:
        """Return the number of these columns, for each sequence."""
        return [end - begin for begin, end in self.window(rows)]


def read_rows(batch: Any, lengths: Lengths, model: nn.Module) -> Rows:
    """Find the rows of a batch, and the columns of each row that count.

    Args:
        batch: Tensors in mappings, lists and tuples.
        lengths: (n,) of the rows, or such lengths by tensor; None to read masks.
        model: Its configuration says whether it is an encoder with a decoder.

    Raises:
        TypeError: It is not a batch.
        ValueError: It has no rows; a tensor has another number of rows; or `lengths`
            does not match it.
    """
    by_name = lengths if isinstance(lengths, Mapping) else {}
    if lengths is not None and not isinstance(lengths, Mapping):
        by_name = {"": lengths}
    n = _n_rows(batch, by_name)
    if not n:
        msg = (
            "the batch has no tensor with rows (dimension 0), so there is nothing to "
            "split: give tensors in mappings, tuples or lists, and skip empty batches"
        )
        raise ValueError(msg)
    tensors: dict[str, torch.Tensor] = {}

    def note(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            if value.shape[0] not in (1, n):
                msg = (
                    f"{path or 'the batch'} has {value.shape[0]} rows where the batch "
                    f"has {n}, so it cannot be split by rows. Take it out of the batch "
                    f"and pass it to the model as a separate argument"
                )
                raise ValueError(msg)
            tensors[path] = value
        return value

    _rebuilt(batch, "", n, note)
    axes = {path: {0: _ROWS} if len(t) == n else {} for path, t in tensors.items()}
    begins: list[_Ints] = []
    ends: list[_Ints] = []
    columns: list[int] = []
    for paths, counts, is_target in _sequences(tensors, n, by_name, model):
        begin = counts.argmax(axis=1)
        end = counts.shape[1] - counts[:, ::-1].argmax(axis=1)
        end[~counts.any(axis=1)] = 1
        has_positions = any(_name(path) == "position_ids" for path in paths)
        is_whole = is_target or not has_positions
        for path in paths:
            for axis in _column_axes(path, tensors[path]):
                if tensors[path].shape[axis] == counts.shape[1]:
                    axes[path][axis] = len(begins)
        begins.append(np.zeros_like(begin) if is_whole else begin)
        ends.append(end)
        columns.append(counts.shape[1])
    shape = n, len(begins)
    first, behind = (np.array(each).T.reshape(shape) for each in (begins, ends))
    return Rows(n, first, behind, axes, np.array(columns, dtype=np.int64))


def _n_rows(batch: Any, by_name: Mapping[str, Sequence[int]]) -> int:
    if not isinstance(batch, (torch.Tensor, Mapping, list, tuple)):
        msg = f"a batch is a mapping, a tuple or a list of tensors, got {type(batch)}"
        raise TypeError(msg)
    for own in by_name.values():
        return len(own)
    values: list[Any] = [batch]
    if not isinstance(batch, torch.Tensor):
        values = [*(batch.values() if isinstance(batch, Mapping) else batch)]
    sized: list[Any] = [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
    for value in sized or [v for v in values if isinstance(v, (list, tuple))]:
        return len(value)
    for value in values:
        if isinstance(value, Mapping):
            return _n_rows(value, by_name)
    return 0


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _column_axes(path: str, tensor: torch.Tensor) -> range:
    """Return the dimensions that may be columns: of a mask all but the rows."""
    return range(1, tensor.dim() if _name(path).endswith("mask") else 2)


def _sequences(
    tensors: Mapping[str, torch.Tensor],
    n: int,
    by_name: Mapping[str, Sequence[int]],
    model: nn.Module,
) -> list[tuple[list[str], NDArray[np.bool_], bool]]:
    """Group the tensors that have the same padding.

    Returns:
        For each group: its tensors; (n, columns) which count; whether they are the
        decoder's.

    Raises:
        ValueError: It is ambiguous which lengths belong to a tensor, or lengths belong
            to none.
    """
    wide = {path: tensor for path, tensor in tensors.items() if tensor.dim() > 1}
    flat = [path for path, tensor in wide.items() if tensor.dim() == 2]
    masks = [path for path in flat if _name(path) in _MASKS]
    sources = [path for path in wide if not _name(path).startswith("decoder_")]
    first = next(iter([*masks, *sources, *wide]), "")
    lengths = {}
    for name, own in by_name.items():
        path = (name or first).removesuffix(".1")
        if path not in wide:
            msg = (
                f"lengths: the batch has no tensor {path!r} with columns; it has "
                f"{', '.join(wide)}"
            )
            raise ValueError(msg)
        lengths[path] = np.asarray(own)
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
                f"lengths: {path} has as many columns as each of "
                f"{' and '.join(alike)}, whose lengths differ, so it is not clear "
                f"whose padding it has: give its lengths, lengths={{{path!r}: ...}}"
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
    """Whether the model is, or wraps, an encoder with a decoder.

    The configuration of a bare encoder may say so too, so the decoder is looked for.
    """
    return any(
        getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        and hasattr(module, "decoder")
        for module in model.modules()
    )


def _counting(
    tensors: Sequence[torch.Tensor],
    paths: Sequence[str],
    n: int,
    lengths: Mapping[str, NDArray[Any]],
) -> NDArray[np.bool_]:
    """Return (n, columns) which columns count in tensors with the same padding."""
    size = tensors[0].shape[1]
    counts, labelled = np.zeros((2, n, size), bool)
    is_known = False
    for path, tensor in zip(paths, tensors, strict=True):
        own, name = lengths.get(path), _name(path)
        if own is not None:
            is_fine = own.shape == (n,) and own.dtype.kind in "iu"
            if not is_fine or own.min() < 0 or own.max() > size:
                msg = (
                    f"lengths: {path or 'the batch'} has {n} rows of {size} columns, "
                    f"so give {n} integers from 0 to {size}, got {own.tolist()[:8]}"
                )
                raise ValueError(msg)
            counts |= np.arange(size) < own[:, None]
            is_known = True
        elif tensor.shape == (n, size) and name in (*_MASKS, "labels"):
            shown = (tensor != (_IGNORED if name == "labels" else 0)).cpu().numpy()
            counts |= shown
            labelled |= shown & (name == "labels")
            is_known = True
    if not is_known:
        return ~counts
    # A label right after padding is predicted from the padding: keep the whole row.
    begins = counts.argmax(axis=1)
    counts[(begins > 0) & labelled[np.arange(n), begins]] = True
    if not lengths.keys() & paths:  # a row that is all masked attends to all columns
        counts[~counts.any(axis=1)] = True
    return counts


def _rebuilt(value: Any, path: str, n: int, take: Callable[[str, Any], Any]) -> Any:
    """Return a batch in which everything that has its rows is replaced.

    Args:
        value: The batch, or a part of it.
        path: The path of that part.
        n: Rows of the batch.
        take: Takes a path and a tensor, or a list or an array with one item a row, and
            returns the replacement.
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
        rows: What `read_rows` returned for it.
        chosen: (k,) The indices of the rows.
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


def _label_counts(labels: torch.Tensor, ignored: int) -> _Floats:
    """Return (2, n) how many labels of each row count: all, and without the first."""
    counted = labels != ignored
    both = counted, counted[:, 1:] if labels.dim() > 1 else counted
    sums = torch.stack([each.reshape(len(labels), -1).sum(1) for each in both])
    return sums.cpu().numpy().astype(np.float64)


def _raise_if_unequal(labels: torch.Tensor | None) -> None:
    """Make sure that a mean over rows is not one over labels.

    Raises:
        ValueError: The rows have different numbers of labels.
    """
    if labels is None or labels.dim() != 2:
        return
    if np.ptp(_label_counts(labels, _IGNORED), axis=1).any():
        msg = (
            "loss: the rows of this batch have different numbers of labels, so their "
            "shares depend on what your loss is a mean over. Give loss='tokens' for "
            "all labels, as in language models (causal ones with shift=True), "
            "loss='rows' for rows, or a function that counts what it is over"
        )
        raise ValueError(msg)


def _token_counts(
    labels: torch.Tensor | None, is_shifted: bool | None, ignore_index: int | None
) -> _Floats:
    """Return (n,) how many labels of each row count.

    Raises:
        ValueError: There are no labels, or it is not known which of them are ignored,
            or whether the first ones are.
    """
    if labels is None:
        msg = (
            "loss='tokens' counts the labels in batch['labels'], and this batch has "
            "none: give a function of a batch that counts what your loss is a mean over"
        )
        raise ValueError(msg)
    if labels.dim() > 2 and ignore_index is None:
        msg = (
            f"loss='tokens': of labels with {labels.dim()} dimensions some models "
            f"ignore {_IGNORED}, others 255. Give ignore_index"
        )
        raise ValueError(msg)
    ignored = _IGNORED if ignore_index is None else ignore_index
    every, later = _label_counts(labels, ignored)
    if is_shifted is None and labels.dim() == 2 and labels.shape[1] > 1:
        is_alike = every * later.sum() == later * every.sum()
        if (~is_alike | ((every > 0) & (later == 0))).any():
            msg = (
                "loss='tokens': the shares of this batch's rows depend on whether the "
                "model counts the first column of labels. Give shift=True if it does "
                "not, because it predicts each label from the columns before it, as "
                "causal language models do; shift=False if it does, as encoders and "
                "encoder-decoders do; or a function that counts what your loss is a "
                "mean over"
            )
            raise ValueError(msg)
    counts: _Floats = later if is_shifted else every
    return counts


def _counted(loss: Callable[[Any], Any], batch: Any, rows: Rows) -> _Floats:
    """Return (n,) what a user's function counts in each row.

    Raises:
        ValueError: A count is negative or not finite, or they do not add up.
    """
    single = (take_rows(batch, rows, np.array([row])) for row in range(rows.n))
    whole, counts = float(loss(batch)), np.array([float(loss(row)) for row in single])
    if counts.min() >= 0.0 and math.isclose(whole, counts.sum(), rel_tol=1e-6):
        return counts
    msg = (
        f"loss: the function counted {whole:.6g} of the whole batch, and "
        f"{counts.sum():.6g} in all of its {rows.n} rows one by one, at least "
        f"{counts.min():.6g}. It must count what your loss is a mean over, such as "
        f"rows or label tokens: at least 0 in each row, and adding up to the count of "
        f"the whole batch. If it counts columns that are padding, give lengths= that "
        f"hold them"
    )
    raise ValueError(msg)


def _raise_if_batch_norm(model: nn.Module) -> None:
    """Make sure that no layer mixes rows.

    Raises:
        MimoseError: A layer of batch norm is in training mode.
    """
    kind = nn.modules.batchnorm._BatchNorm
    for name, module in model.named_modules():
        if isinstance(module, kind) and module.training:
            msg = (
                f"{name or 'the model'}: batch norm in training mode normalises by the "
                f"mean of all rows, so micro-batches would have other gradients than "
                f"the whole batch. Call eval() on it, replace it by group norm, or "
                f"train the batch whole"
            )
            raise MimoseError(msg)


class Splitter:
    """Splits a session's batches, and remembers what has run.

    Args:
        forecasts: Predicts what a step would take.
        last_steps: The steps that a shape refers to.
        budget: The session's budget.
        driver: Runs the steps.
        records: Their records.
        ranks: The ranks that agree on plans; None for none.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        last_steps: LastSteps,
        budget: SessionBudget,
        driver: Driver,
        records: Records,
        ranks: Ranks | None,
    ) -> None:
        self._forecasts, self._last, self._budget = forecasts, last_steps, budget
        self._driver, self._records, self._ranks = driver, records, ranks
        self._ran: deque[tuple[int, int, float]] = deque(maxlen=_MOST_RAN)
        """Rows, columns and growth in bytes of the last micro-batches."""
        self._knots: LRUCache[tuple[int, ...], tuple[int, _Floats]]
        self._knots = LRUCache(_MOST_KNOTS)
        """By budget, rows and columns: the step until which the entry is valid, the
        most elements, and the seconds of shares of them."""
        self._wrapper: Callable[[], Any] | None = None

    def split(
        self,
        model: nn.Module,
        batch: Batch,
        lengths: Lengths,
        loss: Loss,
        shift: bool | None,
        ignore_index: int | None,
    ) -> Iterator[tuple[Batch, float]]:
        """Check a batch, and return its micro-batches; see `Session.micro_batches`."""
        _raise_if_batch_norm(model)
        rows = read_rows(batch, lengths, model)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.shape[:1] != (rows.n,):
            labels = None
        counts = np.ones(rows.n)
        if loss is None:
            _raise_if_unequal(labels)
        elif callable(loss):
            counts = _counted(loss, batch, rows)
        elif loss == "tokens":
            counts = _token_counts(labels, shift, ignore_index)
        elif loss != "rows":
            msg = f"loss: 'rows', 'tokens' or a function of a batch, not {loss!r}"
            raise ValueError(msg)
        may_be_empty = loss not in (None, "rows")
        return self._run(model, batch, rows, counts, may_be_empty=may_be_empty)

    def _run(
        self,
        model: nn.Module,
        batch: Batch,
        rows: Rows,
        counts: _Floats,
        *,
        may_be_empty: bool,
    ) -> Iterator[tuple[Batch, float]]:
        """Yield the micro-batches and their weights.

        Args:
            model: The model.
            batch: The batch.
            rows: Its rows.
            counts: (n,) What counts in each row.
            may_be_empty: Whether a rank's may all be 0.
        """
        order = _sorted(rows.ends - rows.begins)
        order = order[counts[order] > 0]  # a mean over nothing is NaN
        wrapper = self._ddp(model)
        checked = wrapper if may_be_empty else None
        for chosen, is_last, is_again in self._parts(model, rows, order, checked):
            part: Any = take_rows(batch, rows, chosen)
            weight = counts[chosen].sum() / counts.sum() * (not is_again)
            n_begun = self._driver.steps.n_begun
            sync = nullcontext() if wrapper is None or is_last else wrapper.no_sync()
            with sync:
                yield part, float(weight)
            if self._driver.steps.n_begun > n_begun:
                self._note(rows, chosen)
            elif wrapper is not None and not is_last:
                msg = (
                    "the loop took the next micro-batch before it trained this one. "
                    "Under DistributedDataParallel run the forward and the backward of "
                    "each micro-batch inside `for ... in "
                    "session.micro_batches(batch)`, not over a list of them"
                )
                raise MimoseError(msg)

    def _ddp(self, model: nn.Module) -> Any:
        """Return the DDP wrapper around the model; None without one."""
        if n_ranks() < 2:
            return None
        if self._wrapper is None or self._wrapper() is None:
            found = ddp_around(model)
            self._wrapper = nullcontext if found is None else weakref.ref(found)
        return None if self._wrapper is nullcontext else self._wrapper()

    def _parts(
        self,
        model: nn.Module,
        rows: Rows,
        order: _Ints,
        wrapper: Any,
    ) -> Iterator[tuple[_Ints, bool, bool]]:
        """Yield rows, whether they are the last, and whether they are a repetition.

        Args:
            model: The model.
            rows: The batch's rows.
            order: The rows that count, sorted.
            wrapper: DDP's, if its ranks may have nothing that counts, for which the
                others would wait; else None.

        Raises:
            ValueError: Nothing counts where ranks wait.
            MimoseError: The model is shared by tensor parallelism; or another rank has
                raised an error.
        """
        group = waiting = waiting_group(model, self._ranks)
        if waiting is not None:
            shared = parallel_shares(model)
            if shared:
                msg = (
                    f"{next(iter(shared))} is shared by tensor parallelism, whose "
                    f"ranks must run the same rows at the same time, but "
                    f"micro_batches() would split them differently on each rank. Split "
                    f"the batch yourself, the same way on all ranks"
                )
                raise MimoseError(msg)
        elif wrapper is not None:
            group = wrapper.process_group
        found: list[_Ints] = []

        def count() -> int:
            if not len(order) and group is not None:
                raise ValueError(_NOTHING.format(rows.n))
            if waiting is not None:
                found.extend(chosen for chosen, _ in self._walk(rows, order))
            return len(found)

        most, n = count() if group is None else most_of_ranks(count, group), len(found)
        if waiting is not None:
            found += [min(found, key=len)] * (most - n)
            for at, chosen in enumerate(found):
                yield chosen, at == most - 1, at >= n
            return
        for chosen, is_last in self._walk(rows, order):
            yield chosen, is_last, False

    def _walk(self, rows: Rows, order: _Ints) -> Iterator[tuple[_Ints, bool]]:
        """Yield rows, and whether they are the last."""
        self._driver.renew_budget()  # the window begins before its first forward
        ends: list[int] = []
        while len(order):
            # A single row runs in any case: `_split` has checked the longest.
            if not ends or (ends[0] > 1 and not self._may_run(rows, order[: ends[0]])):
                ends = self._split(rows, order)
            end, *rest = ends
            chosen, order = order[:end], order[end:]
            ends = [each - end for each in rest]
            yield chosen, not len(order)

    def _shape(self, rows: Rows, n: int, widths: Sequence[int]) -> dict[str, int]:
        """Return a micro-batch's sizes by their names in the model; {} if not known."""
        last = self._last.typical or self._last.last
        if last is None:
            return {}
        own: dict[int, tuple[str, int]] = {}
        for path, axes in rows.axes.items():
            for axis, role in axes.items():
                column = last[1].column(f"{path}.{axis}")
                if column is not None:
                    own.setdefault(column, (f"{path}.{axis}", role))
        if not any(role == _ROWS for _, role in own.values()):
            return {}
        return {k: n if role == _ROWS else widths[role] for k, role in own.values()}

    def _ask(self, rows: Rows, n: int, widths: Sequence[int]) -> Forecast | None:
        shape = self._shape(rows, n, widths)
        if not shape:
            return None
        try:
            return self._forecasts.ask(shape, None, True)
        except MimoseError:  # nothing was measured, or no plan is made for such steps
            return None

    def _may_run(self, rows: Rows, chosen: _Ints) -> bool:
        """Whether a micro-batch is predicted to fit, or is small enough to be tried."""
        n, widths = len(chosen), rows.widths(chosen)
        found = self._ask(rows, n, widths)
        if found is not None and found.fits is not None:
            return found.fits
        memory = self._budget.memory_now()
        room = (self._budget.n_bytes - memory.start_bytes) / memory.reserved_ratio
        columns = sum(widths)
        for n_ran, wide, growth in self._ran:
            # Memory grows at most by the square of the columns, as attention scores do.
            times = n / n_ran * max(1.0, columns / max(1, wide)) ** 2
            if times <= _GROWTH and times * growth <= room:
                return True
        return n == 1

    def _note(self, rows: Rows, chosen: _Ints) -> None:
        """Record the growth of a micro-batch."""
        if self._records:
            growth = self._records[-1].observed_growth_bytes or 0
            self._ran.append((len(chosen), sum(rows.widths(chosen)), float(growth)))

    def _split(self, rows: Rows, order: _Ints) -> list[int]:
        """Return the ends of the micro-batches: Note: [The split].

        Returns:
            One past the last row of each micro-batch; if forecasts are missing, only of
            the first.

        Raises:
            InfeasibleBudgetError: The longest row does not fit by itself.
        """
        longest = self._ask(rows, 1, _rounded(rows.widths(order[-1:])))
        if longest is None or longest.fits is None:
            n = 1  # of the shortest rows, as many as may be tried together
            while n < len(order) and self._may_run(rows, order[: 2 * n]):
                n = min(2 * n, len(order))
            return [n]
        if not longest.fits:
            self._raise_if_too_long(rows, order[-1:])
        begins, ends = rows.begins[order], rows.ends[order]
        table = self._table(rows, begins, ends)
        most = table[:, 0].copy()
        while True:
            cuts = _least(begins, ends, most, table)
            first = order[: cuts[0]]
            if len(first) == 1:
                self._raise_if_too_long(rows, first)
            if len(first) == 1 or self._may_run(rows, first):
                return cuts
            self._knots.clear()
            near = most[: 2 * len(first)]
            elements = _elements(len(first), rows.widths(first))
            near[:] = np.minimum(near, _SHRINK * elements)

    def _table(self, rows: Rows, begins: _Ints, ends: _Ints) -> _Floats:
        """Return (m, 1 + shares) forecasts, interpolated: Note: [The split].

        The most elements of a micro-batch that ends at a row, and the seconds of shares
        of them.
        """
        m, knots = len(begins), []
        places = np.unique(np.linspace(0, m - 1, _KNOTS).round().astype(int))
        for place in places:
            near = slice(max(0, place - m // _KNOTS), place + 1)
            spans = ends[near].max(0) - begins[near].min(0)
            knots.append(self._knot(rows, _rounded(spans.tolist())))
        columns = np.array(knots).T
        return np.stack([np.interp(range(m), places, each) for each in columns], axis=1)

    def _knot(self, rows: Rows, widths: Sequence[int]) -> _Floats:
        """Return the most elements at one length, and the seconds of shares of them."""
        n_steps = self._driver.steps.n_begun
        key = self._budget.n_bytes, rows.n, *widths
        until, last = self._knots.get(key, (0, np.empty(0)))
        if n_steps < until:
            return last
        shape = self._shape(rows, 1, widths)
        name = next(name for name in shape if name.endswith(".0"))
        n = max(1, self._forecasts.largest(shape, name, None, rows.n, True))
        some = np.unique(np.ceil(n * _SHARES)).astype(int)
        sizes = np.array([_elements(int(each), widths) for each in some])
        found = [self._ask(rows, int(each), widths) for each in some]
        asked = [f.settled_seconds for f in found if f is not None]
        seconds = [each for each in asked if each is not None]
        known = len(seconds) == len(some)
        cost = np.array(seconds) if known else sizes + _FIXED * sizes[-1]
        knot: _Floats = np.r_[sizes[-1], np.interp(_SHARES * sizes[-1], sizes, cost)]
        self._knots[key] = 2 * n_steps, knot
        return knot

    def _raise_if_too_long(self, rows: Rows, alone: _Ints) -> None:
        """Make sure that a row fits by itself.

        If its prediction is within the budget but not within the margin, it runs, and
        its measured peak decides.
        """
        widths = rows.widths(alone)
        found = self._ask(rows, 1, widths)
        if found is None or self._budget.warns:
            return
        peak = found.peak_bytes
        if peak is None or peak <= found.budget_bytes:
            return
        start = float(self._budget.live_bytes())
        length = f" of {' and '.join(map(str, widths))} columns" if widths else ""
        raise InfeasibleBudgetError(
            found.budget_bytes,
            peak,
            {
                "held before the step": start,
                "the row itself, with everything recomputed": peak - start,
            },
            f"Row {alone[0]} of the batch{length} does not fit by itself. Raise the "
            f"budget to at least {format_bytes(peak)}, or leave such rows out.",
        )


def _elements(n: int, widths: Sequence[int]) -> float:
    return float(n * (sum(widths) or 1))


def _rounded(widths: Sequence[int]) -> list[int]:
    """Return lengths rounded up to those for which forecasts are made."""
    steps = [math.ceil(_OCTAVE * math.log2(width) - 1e-9) for width in widths]
    return [math.ceil(2.0 ** (step / _OCTAVE)) for step in steps]


def _sorted(spans: _Ints) -> _Ints:
    """Return the rows in order of length.

    With two sequences the first one's length is rounded, so that rows of similar source
    length are sorted by their target length.
    """
    n, n_sequences = spans.shape
    if not n_sequences:
        return np.arange(n)
    keys = spans.astype(np.float64).T
    if n_sequences > 1:
        keys[0] = np.ceil(_OCTAVE * np.log2(keys[0]))
    return np.lexsort(keys[::-1])


def _least(begins: _Ints, ends: _Ints, most: _Floats, table: _Floats) -> list[int]:
    """Return the ends of the runs of rows whose total cost is least.

    Args:
        begins: (m, sequences) The first column of each row.
        ends: (m, sequences) One past its last column.
        most: (m,) The most elements of a run that ends at this row.
        table: (m, 1 + shares) Elements, and the seconds of shares of them.
    """
    m = len(begins)
    best, came_from = np.zeros(m + 1), [0] * (m + 1)
    for end in range(1, m + 1):  # of runs of 1, 2, … rows that end here
        first = np.minimum.accumulate(begins[:end][::-1])
        last = np.maximum.accumulate(ends[:end][::-1])
        size = np.arange(1, end + 1) * np.maximum((last - first).sum(1), 1)
        elements, *costs = table[end - 1]
        cost = np.interp(size / elements, _SHARES, costs)
        cost[1:][size[1:] > most[end - 1]] = np.inf
        total = cost + best[:end][::-1]
        came_from[end] = end - 1 - int(total.argmin())
        best[end] = total.min()
    cuts = [m]
    while came_from[cuts[-1]]:
        cuts.append(came_from[cuts[-1]])
    return cuts[::-1]
