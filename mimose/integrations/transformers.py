"""A callback for the Trainer of transformers, which trains within a memory budget.

Note: [Reaching the trainer]
The trainer passes neither itself nor exceptions to its callbacks. And when a callback
gets the logs, the trainer's history and the loggers before it in the list have read
them already. So the callback finds in the call stack, once a training, the handler that
calls it and the trainer that calls the handler. It moves to the front of the handler's
list, so that all loggers get its metrics. It wraps the trainer's `train`, so that an
exception restores the model, its `training_step`, so that a failed backward can be
repeated, and its `_save_checkpoint`, which all ranks call but only one asks callbacks
for their state.

Note: [Whole windows]
A window is what `gradient_accumulation_steps` batches train, and its gradient is to be
that of one batch of all its samples. Transformers gives the number of labels in the
window to models whose forward takes any argument, but many of them ignore it, and
return a mean (https://github.com/huggingface/transformers/issues/47688). So each batch
is given its own number, and its loss is multiplied by that and divided by the window's.
That is right for a model that ignores the number and for one that does not.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from mimose.arguments import check_integer, raise_if_unknown
from mimose.batch_sampler import BatchSampler
from mimose.batch_stream import BatchStream
from mimose.budget import Budget
from mimose.exceptions import CheckpointingConflictError, MimoseError, NoUnitsError
from mimose.integrations.base import SessionCallback
from mimose.runtime.retry import TrainersStep
from mimose.session import attach_arguments
from mimose.torch_private import COMPILED_MODULE

try:
    from accelerate import DistributedType
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    _message = (
        "mimose.integrations.transformers needs transformers and accelerate: "
        "pip install 'mimose[transformers]'"
    )
    raise ImportError(_message) from error

_log = logging.getLogger(__name__)

_OF_LOADER = (
    *("num_workers", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)
"""What a loader of full batches has in common with the trainer's own."""
_MULTIPLE, _ROWS = "pad_to_multiple_of", "per_device_train_batch_size"
_GREATEST = "max_position_embeddings", "max_target_positions", "model_max_length"
"""What configurations and tokenizers call the greatest length."""
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""The new and the old name of a trainer's setting; both have the same value."""


class MimoseCallback(SessionCallback, TrainerCallback, ExportableState):
    """Keeps a `Trainer`'s steps within a memory budget.

    ::

        trainer = Trainer(model, args, train_dataset=data,
                          callbacks=[MimoseCallback(budget="6GiB")])

    It attaches when training begins, and detaches when training ends or fails.
    Evaluation and generation run without plans. Its metrics, named `mimose/...` (see
    `mimose.report.metrics.MetricsReader`), appear with the trainer's own in the
    console, in `log_history` and in every `report_to` integration. It saves what it
    learned with each checkpoint, and a resumed run plans from its first step.

    Args:
        budget: As for `mimose.attach`.
        module: The module to attach to, if one forward of the model is not a whole
            step: a loss that holds the model and calls it several times.
        is_restored: For the trainer only, which restores callbacks from a checkpoint:
            use the arguments of the callback that was made last, because JSON cannot
            hold all arguments.
        options: All other arguments of `mimose.attach`, such as `layers`. With
            ``on_infeasible="warn"`` a model without layers is trained without plans.

    Raises:
        TypeError: `mimose.attach` has no such argument.

    Attributes:
        session: The session of the present training, or of the last one; None before.
    """

    _last: ClassVar[Any] = None
    """The arguments of the callback that was made last. They keep no model alive."""

    def __init__(
        self,
        budget: Budget | Callable[[], Budget] = None,
        *,
        module: nn.Module | None = None,
        is_restored: bool = False,
        **options: Any,
    ) -> None:
        if is_restored and MimoseCallback._last is not None:
            budget, root, options = MimoseCallback._last
            module = root()
        super().__init__(budget, options)
        self._root = module
        root = (lambda: None) if module is None else weakref.ref(module)
        MimoseCallback._last = budget, root, options

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the trainer's settings, and wrap its `train`.

        Raises:
            CheckpointingConflictError: Its own checkpointing is switched on.
        """
        del state, control, kwargs
        _raise_if_conflicting(args)
        trainer = _calling()
        if trainer is not None:
            _guard(trainer)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Attach to the model, unless the trainer has only restarted its loop.

        Raises:
            MimoseError: As for `mimose.attach`.
        """
        del control
        _raise_if_conflicting(args)
        trainer = _calling()
        if trainer is not None:
            callbacks = trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)
            _guard(trainer)
        model = _running(trainer, kwargs["model"])
        if self._root is not None:
            model = _root_of(self._root, model)
        saved = _saved_state(state, type(self).__name__)
        self._batches = saved.get("batches") if state.global_step else None
        if self._attached_to is model:  # restarted, with smaller batches
            self._draw(kwargs.get("train_dataloader"))
            return
        self.detach()
        self.session = self._metrics = None
        try:
            self._attach(model, self._options["layers"], saved.get("learned"))
        except NoUnitsError as error:
            raises = self._options.get("on_infeasible", "raise") == "raise"
            if raises or self._options["layers"] is not None:
                raise
            _log.warning("mimose: this training runs without plans: %s", error)
        self._draw(kwargs.get("train_dataloader"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a batch that was trained."""
        del args, state, control
        self._count_batch(getattr(kwargs.get("train_dataloader"), "n_open", 0))

    on_substep_end = on_step_end

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to the logs and to the history."""
        del args, control, kwargs
        if logs is None or self._metrics is None:
            return
        fresh = self._metrics.read()
        logs.update(fresh)
        history = state.log_history
        if history and history[-1].get("step") == state.global_step:
            history[-1].update(fresh)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the report, and detach."""
        del args, control, kwargs
        if state.is_world_process_zero:
            self._log_report()
        self.detach()

    def state(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data."""
        attributes = {"learned": self._remember(), "batches": self._drawn()}
        return {"args": {"is_restored": True}, "attributes": attributes}


def _raise_if_conflicting(args: Any) -> None:
    """Make sure that nothing else decides what is recomputed.

    Raises:
        CheckpointingConflictError: The trainer's own checkpointing is switched on.
    """
    kind = type(args).__name__
    for name in _CHECKPOINTING:
        if getattr(args, name, False):
            msg = (
                f"{kind} has {name}=True (perhaps by default), but with MimoseCallback "
                f"mimose decides what is recomputed: set {kind}(..., {name}=False)"
            )
            raise CheckpointingConflictError(msg)


def _running(trainer: Trainer | None, model: nn.Module) -> nn.Module:
    """Return the model that the trainer runs: it may be a copy with compiled layers."""
    wrapped: Any = None if trainer is None else trainer.model_wrapped
    inner = getattr(wrapped, COMPILED_MODULE, None)
    is_around = inner is not None and getattr(inner, "module", inner) is model
    return wrapped if is_around else model


def _root_of(root: nn.Module, model: nn.Module) -> nn.Module:
    """Return the given module, if it holds the model of the trainer.

    Raises:
        MimoseError: It does not.
    """
    if all(module is not model for module in root.modules()):
        msg = (
            f"MimoseCallback(module=...): the {type(root).__name__} does not hold the "
            f"{type(model).__name__} that the trainer trains: give the loss module "
            f"that the trainer calls, built around that model"
        )
        raise MimoseError(msg)
    return root


def _saved_state(state: Any, name: str) -> Mapping[str, Any]:
    """Return the state of a callback in the checkpoint; empty if there is none."""
    saved = (state.stateful_callbacks or {}).get(name)
    if isinstance(saved, list):
        saved = saved[-1] if saved else None
    return {} if saved is None else saved.get("attributes", {})


def fill_budget(
    trainer_class: type[Trainer] = Trainer,
    budget: Budget | Callable[[], Budget] = None,
    *,
    lengths: Any = None,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    min_rows: int | None = None,
    pad_to_multiple_of: int | None = 8,
    balance: bool = False,
    buffer: int | None = None,
    **options: Any,
) -> type[Trainer]:
    """Return a Trainer class whose batches have as many rows as the budget allows.

    ::

        trainer = fill_budget(Trainer, "6GiB")(model, args, train_dataset=data)

    The class adds a `MimoseCallback`, and trains on the batches of a
    `mimose.BatchSampler`, of an `IterableDataset` on those of a `mimose.BatchStream`,
    instead of ``per_device_train_batch_size`` rows. Evaluation does not change. Set
    ``max_steps``, because the number of batches in an epoch is not known in advance. If
    an epoch ends inside a window of ``gradient_accumulation_steps``, the batches of the
    next one complete it, and what runs at the end of epochs runs after that step. The
    gradient of a window is that of one batch of all its samples, if the loss is a mean
    over labels that are not -100, or without ``labels`` over rows. A resumed run
    continues after the last trained batch; the trainer's own skipping is switched off
    (``ignore_data_skip``).

    Of an `IterableDataset` each rank trains every n-th sample, or its shards, as
    `datasets.distributed` splits them. It must yield the same samples in the same order
    on all ranks, and again if a run is resumed, which reads what was trained and leaves
    it out. Batches are collated in the main process. Ranks that end early repeat
    samples with a weight of 0, or all stop, if ``even_batches`` of the accelerator's
    settings is switched off or ``dataloader_drop_last`` on.

    Args:
        trainer_class: `Trainer`, or a class derived from it.
        budget: As for `mimose.attach`.
        lengths: (n_samples,) As for `mimose.BatchSampler`. None to read the dataset's
            column of lengths (``length_column_name``), or to measure its inputs, and
            its labels if these have other lengths. Of an `IterableDataset` the name of
            a column, or a function of a sample, as `length` of `mimose.BatchStream`.
        max_rows: As for `mimose.BatchSampler`.
        max_tokens: As for `mimose.BatchSampler`.
        min_rows: As for `mimose.BatchSampler`. None for ``per_device_train_batch_size``
            if that was given another value than transformers' default, else for 1.
        pad_to_multiple_of: Set in a copy of the collator, for training only, so that
            batches have few different shapes. A value that the collator has is kept.
            None changes nothing, and neither does a collator without this attribute,
            or a multiple beyond the greatest length of the model or the tokenizer.
        balance: As for `mimose.BatchSampler`; ranks of a stream balance by themselves.
        buffer: As for `mimose.BatchStream`.
        options: All other arguments of `MimoseCallback`.

    Returns:
        The class. Its ``get_train_dataloader`` raises `MimoseError` if ``max_steps`` is
        not set, or no lengths are found, or not one for each sample of a dataset with
        an index, or a list of them for one without.

    Raises:
        TypeError: There is no argument of a given name; it has the nearest one.
        ValueError: `pad_to_multiple_of` is not an integer of at least 1.
    """
    if pad_to_multiple_of is not None:
        check_integer(_MULTIPLE, pad_to_multiple_of)
    known = [*_FILLS, *attach_arguments(), "learned", "module"]
    others = {name: value for name, value in options.items() if name not in known}
    raise_if_unknown(others, [*dict.fromkeys(known)], "fill_budget")

    class Filling(trainer_class):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            callbacks = [*(kwargs.pop("callbacks", None) or ())]
            callbacks.append(MimoseCallback(budget, **options))
            super().__init__(*args, callbacks=callbacks, **kwargs)
            self.args.ignore_data_skip = True

        def get_train_dataloader(self) -> Any:
            """Return a loader whose batches the session draws."""
            if self.args.max_steps < 1:
                msg = (
                    f"fill_budget: max_steps is {self.args.max_steps}, but the number "
                    f"of batches in an epoch is not known before its end, because rows "
                    f"follow the budget: set TrainingArguments(max_steps=...)"
                )
                raise MimoseError(msg)
            own = super().get_train_dataloader()
            limits = {"max_rows": max_rows, "max_tokens": max_tokens}
            limits["min_rows"] = _least_rows(self, min_rows)
            is_stream = isinstance(self.train_dataset, IterableDataset)
            more = {"buffer": buffer} if is_stream else {"balance": balance}
            batches = (_streamed if is_stream else _sampled)(
                self, own, lengths, pad_to_multiple_of, {**limits, **more}
            )
            n_batches = self.args.gradient_accumulation_steps
            self._windows = _Windows(batches, own.dataset, n_batches)
            return self._windows

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            """Draw a window, and count its items: Note: [Whole windows]."""
            again: list[Any] = self._windows.again
            again.clear()
            found = super().get_batch_samples(*args, **kwargs)
            if not self._is_one_of_several():
                return found
            n_of_again = sum(_n_items(self, batch) for batch in again)
            if found[1] is None:  # else the trainer has counted
                n_of_all = sum(_n_items(self, batch) for batch in found[0])
                if found[0]:
                    self._n_of_window = self._over_ranks(n_of_all - n_of_again, "mean")
            elif self._windows.repeats and found[0]:
                found = found[0], found[1] - self._over_ranks(n_of_again, "sum")
            return found

        def _over_ranks(self, count: int, how: str) -> Any:
            """Return a number joined over ranks, if the trainer does so."""
            args = self.args
            if not args.average_tokens_across_devices or args.world_size == 1:
                return float(count)
            number = torch.tensor(count, dtype=torch.float64, device=args.device)
            return self.accelerator.reduce(number, how)

        def _is_one_of_several(self) -> bool:
            """Whether a batch's gradient is joined with those of others."""
            args = self.args
            return bool(args.gradient_accumulation_steps * args.world_size > 1)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            """Train a batch, whose loss is not divided by the number of batches."""
            if self._is_one_of_several():
                self._n_of_batch = max(1, _n_items(self, inputs))
                is_again = any(inputs is each for each in self._windows.again)
                self._share = 0 if is_again else self._n_of_batch
            self.current_gradient_accumulation_steps = 1
            return super().training_step(model, inputs, *args, **kw)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            """Weight the loss by the batch's share of the window's items."""
            if not model.training or not self._is_one_of_several():
                return super().compute_loss(model, inputs, *args, **kw)
            n, of = self._n_of_batch, kw.get("num_items_in_batch")
            if of is None:
                of = self._n_of_window
            else:
                kw["num_items_in_batch"] = of * 0 + n  # a tensor remains one
            of = of if self._share else 1  # only repeats in a window: 0 items
            found = super().compute_loss(model, inputs, *args, **kw)
            if isinstance(found, tuple):
                return found[0] / of * self._share, *found[1:]
            return found / of * self._share

    Filling.__name__ = Filling.__qualname__ = f"Filling{trainer_class.__name__}"
    return Filling


def _sampled(
    trainer: Any, own: Any, lengths: Any, multiple: int | None, limits: dict[str, Any]
) -> DataLoader[Any]:
    """Return a loader of a sampler's batches.

    Args:
        trainer: The trainer.
        own: Its own loader.
        lengths: As for `fill_budget`.
        multiple: As well.
        limits: Of the sampler.
    """
    args, dataset = trainer.args, own.dataset
    if isinstance(lengths, str):
        lengths = dataset[lengths]
    if callable(lengths):
        lengths = [lengths(sample) for sample in dataset]
    found = _lengths(trainer) if lengths is None else lengths
    columns = found.values() if isinstance(found, Mapping) else (found,)
    for each in columns:
        if len(each) != len(dataset):
            msg = (
                f"fill_budget: there are {len(each)} lengths and {len(dataset)} "
                f"samples in the dataset: give one length for each sample, in the "
                f"order of the dataset"
            )
            raise MimoseError(msg)
    collate = own.collate_fn
    if multiple is not None:
        longest = max(int(np.max(np.asarray(each))) for each in columns)
        collate, multiple = _rounding(trainer, collate, longest, multiple)
    sampler = BatchSampler(
        found,
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
        pad_to_multiple_of=multiple,
        rank=args.process_index,
        world_size=args.world_size,
        **limits,
    )
    options = {name: getattr(own, name) for name in (*_OF_LOADER, "pin_memory")}
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)


def _streamed(
    trainer: Any, own: Any, length: Any, multiple: int | None, limits: dict[str, Any]
) -> BatchStream:
    """Return a stream of batches of this rank's samples; as `_sampled`.

    Raises:
        MimoseError: There is a list of lengths.
    """
    args, dataset = trainer.args, trainer.train_dataset
    if not (length is None or isinstance(length, str) or callable(length)):
        msg = (
            f"fill_budget: the {type(dataset).__name__} is an IterableDataset, whose "
            f"samples are not numbered as the {type(length).__name__} of lengths is: "
            f"give the name of a column, or a function of a sample"
        )
        raise MimoseError(msg)
    collate, n_ranks = own.collate_fn, args.world_size
    if multiple is not None:
        collate, multiple = _rounding(trainer, collate, None, multiple)
    if n_ranks > 1 and hasattr(dataset, "num_shards"):
        from datasets.distributed import split_dataset_by_node

        dataset = split_dataset_by_node(dataset, args.process_index, n_ranks)
    elif n_ranks > 1:
        dataset = _Part(dataset, args.process_index, n_ranks)
    options = {name: getattr(own, name) for name in _OF_LOADER}
    is_even = args.accelerator_config.even_batches and not args.dataloader_drop_last
    return BatchStream(
        DataLoader(dataset, batch_size=None, collate_fn=_as_it_is, **options),
        length=_Length(trainer) if length is None else length,
        collate_fn=collate,
        seed=args.seed if args.data_seed is None else args.data_seed,
        pad_to_multiple_of=multiple,
        even_batches=is_even,
        rank=args.process_index,
        world_size=n_ranks,
        **limits,
    )


def _as_it_is(sample: Any) -> Any:
    return sample


_FILLS = [*inspect.signature(fill_budget).parameters][:-1]
"""The arguments of `fill_budget` itself."""


class _Part(IterableDataset[Any]):
    """One rank's samples of a stream."""

    def __init__(self, dataset: Any, rank: int, n_ranks: int) -> None:
        self._dataset, self._rank, self._n_ranks = dataset, rank, n_ranks

    def __iter__(self) -> Any:
        return itertools.islice(self._dataset, self._rank, None, self._n_ranks)

    def set_epoch(self, epoch: int) -> None:
        """Begin another order, if the stream has several."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)


def _least_rows(trainer: Any, asked: int | None) -> int:
    """Return the least rows of a batch, and say where they come from."""
    args = trainer.args
    n = getattr(args, _ROWS)
    if asked is not None:
        return asked
    is_given = n != type(args).__dataclass_fields__[_ROWS].default
    if trainer.is_world_process_zero() and is_given:
        _log.info(
            "fill_budget: batches have at least %d rows where so many fit, as %s says; "
            "min_rows=1 trains the rows that are fastest",
            *(n, _ROWS),
        )
    elif trainer.is_world_process_zero():
        _log.info(
            "fill_budget: batches have the rows that are fastest, not %d as %s says by "
            "default; min_rows=%d makes these the least where so many fit",
            *(n, _ROWS, n),
        )
    return n if is_given else 1


class _Windows:
    """Whole windows of accumulated batches, without a length.

    If an epoch of what draws the batches ends inside a window, the batches of its next
    one complete it. The trainer's epoch ends with that window, and the next one goes on
    behind it.

    The Trainer of older transformers reads the length once, and skips later batches.

    Args:
        batches: A loader with a `BatchSampler`, or a `BatchStream`.
        dataset: The trainer's.
        n_batches: How many a window has.

    Attributes:
        dataset: As given.
        batch_sampler: What draws the batches.
        n_open: Batches of a window that were drawn before its present epoch began.
        again: The batches of the window that were trained before.
        repeats: Whether there may be some.
    """

    def __init__(
        self, batches: DataLoader[Any] | BatchStream, dataset: Any, n_batches: int
    ) -> None:
        self._batches, self.dataset, self._n_batches = batches, dataset, n_batches
        self.repeats = isinstance(batches, BatchStream)
        self.batch_sampler: Any = getattr(batches, "batch_sampler", batches)
        self.n_open, self.again = 0, list[Any]()
        self._rest: Any = None
        """What is left of an epoch for the next of the trainer."""

    def __iter__(self) -> Any:
        """Yield the batches of an epoch, and what completes its last window."""
        sampler = self.batch_sampler
        batches, n_before, n = self._rest, -1, 0  # what is left may be empty
        if batches is None:
            batches = iter(self._batches)  # as what a loaded state has left
        self._rest, self.n_open = None, 0
        while True:
            for batch in batches:
                n += 1
                if self.repeats and sampler.is_repeated:
                    self.again.append(batch)
                yield batch
                if self.n_open and n % self._n_batches == 0:
                    self._rest = batches
                    return
            self.n_open = n % self._n_batches
            if n == n_before or (n and not self.n_open):
                return
            n_before = n
            if sampler.session is not None:
                sampler.session.collation.keep(self.n_open)
            if not self.repeats:
                sampler.set_epoch(sampler.epoch + 1)
            batches = iter(self._batches)

    def __len__(self) -> int:
        msg = (
            "the number of batches in an epoch is not known before its end, because "
            "their rows follow the budget: set TrainingArguments(max_steps=...)"
        )
        raise TypeError(msg)


def _n_items(trainer: Any, batch: Any) -> int:
    """Return the labels that transformers counts in a batch; without any, its rows."""
    named = batch if isinstance(batch, Mapping) else {}
    labels = named.get("shift_labels", named.get("labels"))
    if isinstance(labels, torch.Tensor):
        if "shift_labels" not in named and getattr(
            trainer, "_loss_shifts_labels", False
        ):
            labels = labels[..., 1:]
        return int(labels.ne(-100).sum())
    tensors = (each for each in named.values() if isinstance(each, torch.Tensor))
    return next((len(each) for each in tensors if each.ndim), 1)


def _lengths(trainer: Any) -> Any:
    """Return the lengths of a trainer's samples, by the names of sizes."""
    dataset, column = trainer.train_dataset, trainer.args.length_column_name
    if column in (getattr(dataset, "column_names", None) or ()):
        return list(dataset[column])
    inputs = getattr(trainer.model, "main_input_name", "input_ids")
    if inputs not in dataset[0]:
        msg = (
            f"fill_budget: the length of samples is not known, because they have no "
            f"{inputs!r} and the dataset has no column {column!r}: give lengths=[...], "
            f"one integer for each sample"
        )
        raise MimoseError(msg)
    names, labels = [inputs], dataset[0].get("labels")
    if getattr(labels, "ndim", isinstance(labels, list | tuple)):
        names.append("labels")
    found = {name: [len(sample[name]) for sample in dataset] for name in names}
    if found.get("labels") in (None, found[inputs]):
        return found[inputs]
    return {f"{name}.1": lengths for name, lengths in found.items()}


class _Length:
    """Measures a stream's samples as `_lengths` does; the first one says how."""

    def __init__(self, trainer: Any) -> None:
        self._column = trainer.args.length_column_name
        self._inputs = getattr(trainer.model, "main_input_name", "input_ids")
        self._names: list[str] | None = None

    def __call__(self, sample: Any) -> Any:
        if self._column in sample:
            return sample[self._column]
        inputs = sample[self._inputs]
        if self._names is None:
            self._names, labels = [self._inputs], sample.get("labels")
            is_list = getattr(labels, "ndim", isinstance(labels, list | tuple))
            if is_list and len(labels) != len(inputs):
                self._names.append("labels")
        if len(self._names) == 1:
            return len(inputs)
        return {f"{name}.1": len(sample[name]) for name in self._names}


def _rounding(
    trainer: Any, collate: Any, longest: int | None, multiple: int
) -> tuple[Any, int | None]:
    """Return a collator that rounds padded lengths up, and to which multiple.

    Args:
        trainer: Its model and tokenizer have a greatest length.
        collate: The loader's, perhaps with the user's collator in it.
        longest: The longest sample; None if it is not known.
        multiple: What is asked for.
    """
    inner = getattr(collate, "data_collator", collate)
    name = getattr(inner, "__name__", type(inner).__name__)
    own, why_not = getattr(inner, _MULTIPLE, None), ""
    found = collate
    if own is None:
        why_not = _why_not_rounded(trainer, inner, longest, multiple)
    if own is None and not why_not:
        try:
            rounding = copy.copy(inner)
            setattr(rounding, _MULTIPLE, multiple)
            found = rounding if inner is collate else copy.copy(collate)
            if inner is not collate:
                found.data_collator = rounding
        except Exception as error:  # whatever a class of the user's raises
            found, why_not = collate, f"it cannot be set ({type(error).__name__})"
    if trainer.is_world_process_zero():
        if why_not:
            _log.info("fill_budget: %s pads without a multiple: %s", name, why_not)
        elif own is None:
            _log.info(
                "fill_budget: %s pads to multiples of %d, so that batches have few "
                "shapes. pad_to_multiple_of=None switches it off",
                *(name, multiple),
            )
    return found, own if own is not None or why_not else multiple


def _why_not_rounded(
    trainer: Any, inner: Any, longest: int | None, multiple: int
) -> str:
    """Return why a collator cannot round lengths up; "" if it can."""
    if not hasattr(inner, _MULTIPLE):
        return f"it has no {_MULTIPLE}"
    if getattr(inner, "padding", True) not in (True, "longest"):
        return "it does not pad to the longest sample"
    config = getattr(trainer.model, "config", None)
    parts = [config, *getattr(config, "__dict__", {}).values()]
    tokenizer = getattr(trainer, "processing_class", None)
    parts += [tokenizer, getattr(inner, "tokenizer", None)]
    known = [getattr(part, name, None) for part in parts for name in _GREATEST]
    for n in known:
        if isinstance(n, int):
            most = n if longest is None else longest
            rounded = -(-most // multiple) * multiple
            if most <= n < rounded:
                return f"{rounded} would pass the greatest length, {n}"
    return ""


def _calling() -> Trainer | None:
    """Find the trainer that calls a callback."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None


def _guard(trainer: Any) -> None:
    """Wrap a trainer's methods: Note: [Reaching the trainer].

    Args:
        trainer: The trainer. If it is training already, only its steps are wrapped.
    """
    if getattr(trainer.train, "func", None) is _guarded:
        return
    guarded, repeated = (functools.partial(f, trainer) for f in (_guarded, _repeated))
    step = _own(trainer, "training_step")
    if trainer.is_in_train:
        step = functools.partial(guarded, step)
    trainer.training_step = functools.partial(repeated, step)
    save = functools.partial(_saved_by_all, trainer, _own(trainer, "_save_checkpoint"))
    trainer._save_checkpoint = save
    trainer.train = functools.partial(guarded, _own(trainer, "train"))


def _own(trainer: Any, name: str) -> Any:
    """Return a method; a bound one would be pickled as what replaces it."""
    found = vars(trainer).get(name)
    return found or functools.partial(getattr(type(trainer), name), trainer)


def _callbacks(trainer: Any) -> list[MimoseCallback]:
    every = trainer.callback_handler.callbacks
    return [callback for callback in every if isinstance(callback, MimoseCallback)]


def _guarded(trainer: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a trainer's method, and detach the callbacks if it raises."""
    try:
        return method(*args, **kwargs)
    except BaseException:
        for callback in _callbacks(trainer):
            callback.detach()
        raise


def _saved_by_all(trainer: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint, with where the streams of all ranks are."""
    for callback in _callbacks(trainer):
        callback._drawn(on_all=True)
    return method(*args, **kwargs)


def _repeated(
    trainer: Any, method: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a trainer's step on one batch, and repeat it if its backward fails.

    It is repeated only if one process trains and there are no gradients yet.
    """
    kind = getattr(trainer.accelerator, "distributed_type", None)
    attached = [c for c in _callbacks(trainer) if c.begin_attempts() is not None]
    if len(attached) != 1 or kind != DistributedType.NO:
        return method(model, inputs, *args, **kwargs)
    step = TrainersStep(model, attached[0].begin_attempts)
    step.note_gradients()
    spare = copy.copy(inputs)  # a step may remove items from its inputs

    def attempt() -> Any:
        given = copy.copy(spare) if step.n_failed else inputs
        return method(model, given, *args, **kwargs)

    return step.run(attempt)
