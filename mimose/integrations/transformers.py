"""A callback for the Trainer of transformers: one line, and it trains in a budget.

Note: [Reaching the trainer]
The trainer gives a callback neither itself nor a word of an exception, and by the time
a callback sees the logs, the trainer's history and the loggers before it in the list
have taken theirs. So the callback looks up, once a training, which handler is calling
it and which trainer is calling that. It then moves to the front of the handler's list,
so that what it adds to the logs reaches all, and wraps that trainer's `train`, so that
an exception anywhere in it leaves the model as it was, and its `training_step`, in
which a failed backward can be repeated.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from mimose.batch_sampler import BatchSampler
from mimose.budget import Budget
from mimose.exceptions import CheckpointingConflictError, MimoseError, NoUnitsError
from mimose.inputs.compiled import WHY_NOT_WHOLE
from mimose.integrations.base import SessionCallback
from mimose.runtime.retry import TrainersStep
from mimose.torch_private import COMPILED_MODULE

try:
    from accelerate import DistributedType
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import CallbackHandler, ExportableState
except ImportError as error:
    _message = (
        "mimose.integrations.transformers needs transformers and accelerate: "
        "pip install 'mimose[transformers]'"
    )
    raise ImportError(_message) from error

_log = logging.getLogger(__name__)

_REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
_YES = ("1", "on", "t", "true", "y", "yes")
"""What accelerate takes for a flag that is set."""
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""A trainer's setting, by its name and by the older one, which has the same value."""


class MimoseCallback(SessionCallback, TrainerCallback, ExportableState):
    """Keeps a `Trainer`'s steps within a memory budget.

    ::

        trainer = Trainer(model, args, train_dataset=data,
                          callbacks=[MimoseCallback(budget="6GiB")])

    It attaches when training begins and detaches when it ends, however it ends.
    Evaluation and generation pass through. `mimose/...` metrics (see
    `mimose.report.metrics.MetricsReader`) join the trainer's own in the console,
    `log_history` and every `report_to` integration. What was learned is saved with
    each checkpoint, and a run that is resumed from one plans from its first step on.

    Args:
        budget: As for `mimose.attach`.
        module: What to attach to, where the model's own forward is not a step: a loss
            that holds the model and calls it several times.
        is_restored: Take the arguments of the callback that was made last. A trainer
            that restores callbacks from a checkpoint makes them so: JSON cannot hold
            all arguments.
        options: All others of `mimose.attach`, such as `layers`. With
            ``on_infeasible="warn"`` it also trains on, without any plan, where the
            model has no layers to plan for.

    Raises:
        TypeError: `mimose.attach` has no such option.

    Attributes:
        session: The session of the running training, or of the last; None before.
    """

    _last: ClassVar[Any] = None
    """The arguments of the callback made last; no model is kept alive by them."""

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

    # ------------------------------------------------------------------ calls

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a trainer whose settings leave nothing to plan; guard its `train`."""
        del state, control, kwargs
        _raise_if_conflicting(args)
        _, trainer = _callers()
        if trainer is not None:
            _guard(trainer)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Attach to the model, or go on where the trainer has begun anew."""
        del control
        _raise_if_conflicting(args)
        handler, trainer = _callers()
        if handler is not None and trainer is not None:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)
            _guard(trainer)
        model = _running(trainer, kwargs["model"])
        if self._root is not None:
            model = _root_of(self._root, model)
        saved = _saved_state(state, type(self).__name__)
        self._batches = saved.get("batches") if state.global_step else None
        if self._attached_to is model:  # begun again, with smaller batches
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
            _log.warning("mimose: this training is not planned: %s", error)
        self._draw(kwargs.get("train_dataloader"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a batch that was trained."""
        del args, state, control, kwargs
        self._count_batch()

    on_substep_end = on_step_end

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to what is logged, and to the history."""
        del args, control, kwargs
        if logs is None or self._metrics is None:
            return
        fresh = self._metrics.read()
        logs.update(fresh)
        history = state.log_history
        if history and history[-1].get("step") == state.global_step:
            history[-1].update(fresh)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach, and say in one line how it went."""
        del args, control, kwargs
        if state.is_world_process_zero:
            self._tell()
        self.detach()

    def state(self) -> dict[str, Any]:
        """Return what was learned, ready for JSON."""
        attributes = {"learned": self._remember(), "batches": self._drawn()}
        return {"args": {"is_restored": True}, "attributes": attributes}


def _raise_if_conflicting(args: Any) -> None:
    """Raise where a second owner would decide what is recomputed.

    Raises:
        CheckpointingConflictError: The trainer's own checkpointing is switched on.
        MimoseError: The model is to be compiled.
    """
    kind = type(args).__name__
    for name in _CHECKPOINTING:
        if getattr(args, name, False):
            msg = (
                f"{kind} has {name}=True (perhaps by default), and MimoseCallback "
                f"decides what is recomputed, too: set {kind}(..., {name}=False), and "
                f"mimose recomputes what it must"
            )
            raise CheckpointingConflictError(msg)
    is_regional = os.environ.get(_REGIONAL, "").lower() in _YES
    if getattr(args, "torch_compile", False) and not is_regional:
        msg = (
            f"TrainingArguments(torch_compile=True) compiles the model as a whole, and "
            f"{WHY_NOT_WHOLE}; with a Trainer, set the environment variable "
            f"{_REGIONAL}=1"
        )
        raise MimoseError(msg)


def _running(trainer: Trainer | None, model: nn.Module) -> nn.Module:
    """Return what a trainer runs: the model, or its copy with compiled layers."""
    wrapped = None if trainer is None else trainer.model_wrapped
    if wrapped is not None and vars(wrapped).get(COMPILED_MODULE) is model:
        return wrapped
    return model


def _root_of(root: nn.Module, model: nn.Module) -> nn.Module:
    """Return the module that was given, if it holds what the trainer trains.

    Raises:
        MimoseError: It does not.
    """
    if all(module is not model for module in root.modules()):
        msg = (
            f"MimoseCallback(module=...): the {type(root).__name__} does not hold the "
            f"{type(model).__name__} that is trained; give the loss that the trainer "
            f"calls, made with its model"
        )
        raise MimoseError(msg)
    return root


def _saved_state(state: Any, name: str) -> Mapping[str, Any]:
    """Return what a callback of this name has saved with the checkpoint, if any."""
    saved = (state.stateful_callbacks or {}).get(name)
    if isinstance(saved, list):
        saved = saved[-1] if saved else None
    return {} if saved is None else saved.get("attributes", {})


# ------------------------------------------------------------------ full batches


def fill_budget(
    trainer_class: type[Trainer] = Trainer,
    budget: Budget | Callable[[], Budget] = None,
    *,
    lengths: Any = None,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    **options: Any,
) -> type[Trainer]:
    """Make a Trainer whose batches have as many rows as their lengths allow.

    ::

        trainer = fill_budget(Trainer, "6GiB")(model, args, train_dataset=data)

    It has a `MimoseCallback`, and trains on batches of a `mimose.BatchSampler` in place
    of ``per_device_train_batch_size`` rows. Evaluation is as before. How many batches
    an epoch has is not known before, so ``max_steps`` has to be set. A run that
    is resumed goes on behind the last batch trained; the trainer's own skipping is
    switched off (``ignore_data_skip``).

    Args:
        trainer_class: `Trainer`, or a class derived from it.
        budget: As for `mimose.attach`.
        lengths: As for `mimose.BatchSampler`. None: the dataset's column of lengths
            (``length_column_name``), or the lengths of its inputs and of labels that
            have other lengths.
        max_rows: As for `mimose.BatchSampler`.
        max_tokens: As for `mimose.BatchSampler`.
        options: All others of `MimoseCallback`.

    Returns:
        The class; its ``get_train_dataloader`` raises `MimoseError` where ``max_steps``
        is not set, gradients are accumulated, the dataset is iterable, or accelerate
        dispatches batches.
    """

    class Filling(trainer_class):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            callbacks = [*(kwargs.pop("callbacks", None) or ())]
            callbacks.append(MimoseCallback(budget, **options))
            super().__init__(*args, callbacks=callbacks, **kwargs)
            self.args.ignore_data_skip = True

        def get_train_dataloader(self) -> Any:
            """Return a loader whose batches the session draws."""
            own = super().get_train_dataloader()
            _raise_if_unfillable(self, own)
            sampler = BatchSampler(
                _lengths(self) if lengths is None else lengths,
                seed=self.args.seed if (s := self.args.data_seed) is None else s,
                max_rows=max_rows,
                max_tokens=max_tokens,
                drop_last=self.args.dataloader_drop_last,
                rank=self.args.process_index,
                world_size=self.args.world_size,
            )
            return _Unsized(
                own.dataset,
                batch_sampler=sampler,
                collate_fn=own.collate_fn,
                num_workers=own.num_workers,
                pin_memory=own.pin_memory,
                worker_init_fn=own.worker_init_fn,
                multiprocessing_context=own.multiprocessing_context,
                prefetch_factor=own.prefetch_factor,
                persistent_workers=own.persistent_workers,
            )

    Filling.__name__ = Filling.__qualname__ = f"Filling{trainer_class.__name__}"
    return Filling


class _Unsized(DataLoader[Any]):
    """A loader whose epoch trainers run to its end.

    Trainers of older transformers ask for its length once, and leave out what comes
    behind that many batches.
    """

    def __len__(self) -> int:
        msg = "how many batches an epoch has is known at its end"
        raise TypeError(msg)


def _raise_if_unfillable(trainer: Any, loader: Any) -> None:
    """Raise where a trainer's batches cannot be drawn by lengths."""
    msg = ""
    if isinstance(loader.dataset, IterableDataset):
        msg = "its train_dataset is iterable: rows of like lengths cannot be looked up"
    elif trainer.accelerator.dispatch_batches:
        msg = (
            "accelerate dispatches batches from one process: set "
            "TrainingArguments(accelerator_config={'dispatch_batches': False})"
        )
    elif trainer.args.gradient_accumulation_steps > 1:
        msg = (
            "what an epoch's last batches accumulate would go on to the next epoch's "
            "first step, as the trainer does not know which batch is the last: set "
            "TrainingArguments(gradient_accumulation_steps=1); batches are as large as "
            "the budget holds, or as max_rows and max_tokens allow"
        )
    elif trainer.args.max_steps <= 0:
        msg = (
            "how many batches an epoch has depends on what fits, and the schedule of "
            "the learning rate needs to know the steps: set "
            "TrainingArguments(max_steps=...)"
        )
    if msg:
        raise MimoseError("fill_budget: " + msg)


def _lengths(trainer: Any) -> Any:
    """Return the lengths of a trainer's samples, by the names of sizes."""
    dataset, column = trainer.train_dataset, trainer.args.length_column_name
    if column in (getattr(dataset, "column_names", None) or ()):
        return list(dataset[column])
    inputs = getattr(trainer.model, "main_input_name", "input_ids")
    if inputs not in dataset[0]:
        msg = (
            f"fill_budget: samples have no {inputs!r} whose length could be read, and "
            f"the dataset has no column {column!r}: give lengths=[...]"
        )
        raise MimoseError(msg)
    names, labels = [inputs], dataset[0].get("labels")
    if getattr(labels, "ndim", isinstance(labels, list | tuple)):
        names.append("labels")
    found = {name: [len(sample[name]) for sample in dataset] for name in names}
    if found.get("labels") in (None, found[inputs]):
        return found[inputs]
    return {f"{name}.1": lengths for name, lengths in found.items()}


# ------------------------------------------------------------------ the trainer


def _callers() -> tuple[CallbackHandler | None, Trainer | None]:
    """Find the handler that calls a callback, and the trainer that calls it."""
    handler: CallbackHandler | None = None
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if handler is None and isinstance(caller, CallbackHandler):
            handler = caller
        if isinstance(caller, Trainer):
            return handler, caller
        frame = frame.f_back
    return handler, None


def _guard(trainer: Any) -> None:
    """Let an exception in a trainer's `train` detach its callbacks; repeat its steps.

    Args:
        trainer: Its own attributes are set; a training that runs already is guarded
            step by step.
    """
    if isinstance(trainer.train, _Replaced):
        return
    if trainer.is_in_train:
        trainer.training_step = _Replaced(trainer, "training_step", _guarded)
    trainer.training_step = _Replaced(trainer, "training_step", _repeated)
    trainer.train = _Replaced(trainer, "train", _guarded)


class _Replaced:
    """A trainer's method, and what runs in its place.

    It does not keep the trainer alive, and a copy of the trainer gets its own.

    Args:
        trainer: The trainer.
        name: The method's.
        run: Called with this and a call's arguments.
    """

    def __init__(self, trainer: Any, name: str, run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, getattr(type(trainer), name), updated=())
        self.trainer = weakref.ref(trainer)
        self._name, self._run = name, run
        self._own = vars(trainer).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)

    @property
    def method(self) -> Callable[..., Any]:
        trainer: Any = self.trainer()
        own: Any = self._own or getattr(type(trainer), self._name).__get__(trainer)
        return own  # type: ignore[no-any-return]

    @property
    def callbacks(self) -> list[MimoseCallback]:
        trainer: Any = self.trainer()
        every = trainer.callback_handler.callbacks
        return [callback for callback in every if isinstance(callback, MimoseCallback)]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replaced:
        trainer = self.trainer()
        return _Replaced(memo.get(id(trainer), trainer), self._name, self._run)

    def __reduce__(self) -> Any:
        return _Replaced, (self.trainer(), self._name, self._run)


def _guarded(replaced: _Replaced, *args: Any, **kwargs: Any) -> Any:
    """Run a trainer's method, and detach the callbacks where it raises."""
    try:
        return replaced.method(*args, **kwargs)
    except BaseException:
        for callback in replaced.callbacks:
            callback.detach()
        raise


def _repeated(
    replaced: _Replaced, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a trainer's step on one batch; again, if another plan helps its backward.

    That is where one process trains and no gradients are there yet.
    """
    trainer: Any = replaced.trainer()
    kind = getattr(trainer.accelerator, "distributed_type", None)
    begins = [each.begin_attempts for each in replaced.callbacks]
    attached = [begin for begin in begins if begin() is not None]
    if len(attached) != 1 or kind != DistributedType.NO:
        return replaced.method(model, inputs, *args, **kwargs)
    step = TrainersStep(model, attached[0])
    step.note_gradients()
    given = [copy.copy(inputs)]  # a step may take out of it what it has used

    def attempt() -> Any:
        again = given[0] if step.n_failed else inputs
        given[0] = copy.copy(given[0])
        return replaced.method(model, again, *args, **kwargs)

    return step.run(attempt)
