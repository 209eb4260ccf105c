"""A callback for Lightning's Trainer, which trains within a memory budget.

It works with `lightning.pytorch` and with `pytorch_lightning`, whichever is installed.

Note: [The root]
A step is one forward of a module, the root. Lightning calls `training_step`, which may
call the LightningModule itself, or one or two models in it. Which ones is not known in
advance, so the callback waits. When training starts, it finds the layers and watches
the forwards of all modules that hold some. The first of them that is called in training
mode, with grad enabled, is the root. This is the outermost one, because a module is
called before the modules inside it. The session attaches in that call, so even the
first step is within the budget.

`training_step` itself is not the root: it logs, appends to lists, and in manual
optimization runs backwards and optimizers, so it must not run again if a forward fails.

Note: [The closure]
In automatic optimization Lightning makes a closure for each batch, which runs
`training_step`, zeroes the gradients and runs the backward. Lightning calls it directly
in an accumulation, and else passes it to `optimizer_step` and the precision plugin. So
the callback changes the closure when it is made, so that it can repeat itself. A second
run finds no gradients to zero, and does not log again.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mimose.batch_stream import BatchStream
from mimose.budget import Budget
from mimose.exceptions import MimoseError
from mimose.integrations.base import SessionCallback
from mimose.model.compiled import WHY_NOT_WHOLE
from mimose.model.layers import find_layers
from mimose.model.patch import Patch
from mimose.runtime.retry import Attempts, TrainersStep

_log = logging.getLogger(__name__)


_libraries: list[Any] = []
"""The installed packages; a Trainer takes its package's callbacks."""
for _name in ("lightning.pytorch", "pytorch_lightning"):
    with contextlib.suppress(ModuleNotFoundError):
        _libraries.append(importlib.import_module(_name))
if not _libraries:
    _message = (
        "mimose.integrations.lightning needs lightning or pytorch_lightning: "
        "pip install 'mimose[lightning]'"
    )
    raise ImportError(_message)
_UNWRITTEN = {nn.Module.forward, *[each.LightningModule.forward for each in _libraries]}
"""The forwards of modules that define none."""

if TYPE_CHECKING:
    _Base = object
else:
    _Base = type("_Base", tuple(each.Callback for each in _libraries), {})


_EVALUATES = (
    "mimose: training_step called the layers in evaluation mode, so this training has "
    "no plans: call model.train() before fit (from_pretrained returns a model in "
    "evaluation mode, and Lightning keeps it so)"
)
_CALLS_NOTHING = (
    "mimose: training_step called no module that holds layers, so this training has no "
    "plans. Call the model, or self(batch), in training_step, or name the module with "
    "MimoseCallback(module=...)"
)


class MimoseCallback(SessionCallback, _Base):
    """Keeps the steps of `Trainer.fit` within a memory budget.

    ::

        trainer = Trainer(callbacks=[MimoseCallback(budget="6GiB")])
        trainer.fit(model, data)

    It attaches in the first training step, to the outermost module with layers that
    `training_step` calls: the LightningModule itself (``self(batch)``) or the model in
    it (``self.model(batch)``). It detaches when training ends or fails. Validation runs
    without plans. Its metrics, named `mimose/...` (see
    `mimose.report.metrics.MetricsReader`), go to `trainer.callback_metrics` and the
    loggers every `log_every_n_steps`. It saves what it learned with each checkpoint,
    and a resumed run plans from its first step.

    Args:
        budget: As for `mimose.attach`.
        module: The name of the module to attach to, as an attribute of the
            LightningModule (``"generator"``), if it is not the first one called.
        options: All other arguments of `mimose.attach`. Names in `layers` are relative
            to `module`, or to the LightningModule without it.

    Raises:
        TypeError: `mimose.attach` has no such argument.

    Attributes:
        session: The session of the present training, or of the last one; None before
            the first step.
    """

    def __init__(
        self,
        budget: Budget | Callable[[], Budget] = None,
        *,
        module: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(budget, options)
        self._name = module
        self._scouts: list[Patch] | None = None
        """Patches on the modules that may be the root, until it is found."""
        self._undo_repeats: Callable[[], object] | None = None
        self._has_warned = self._is_evaluating = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that `training_step` is not compiled as a whole.

        Raises:
            MimoseError: It is.
        """
        del trainer
        if stage == "fit" and getattr(pl_module, "_compiler_ctx", None) is not None:
            msg = f"the LightningModule's training_step is compiled: {WHY_NOT_WHOLE}"
            raise MimoseError(msg)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch for the root.

        Raises:
            NoUnitsError: No layers were found.
            AttributeError: There is no module of the given name.
        """
        self.detach()
        self._has_warned = self._is_evaluating = False
        self._metrics = None
        top = pl_module.get_submodule(self._name or "")
        layers = self._options["layers"]
        found = [module for _, module in find_layers(top, layers)]
        if layers is not None and self._name is None:  # names differ inside the root
            chosen = set(map(id, found))

            def layers(module: nn.Module) -> bool:
                return id(module) in chosen

        trained = [m for m in found if any(p.requires_grad for p in m.parameters())]
        roots = _holders(top, trained or found) if self._name is None else [top]
        self._scouts = [
            Patch(each, partial(self._scout, each, layers)) for each in roots
        ]
        own = [each for each in trainer.callbacks if isinstance(each, MimoseCallback)]
        if trainer.world_size == 1 and len(own) <= 1:
            begin = self.begin_attempts
            self._undo_repeats = _repeat_closures(trainer, pl_module, begin)
        if self._draw(trainer.train_dataloader) and trainer.limit_train_batches == 1.0:
            # The loader's length changes from epoch to epoch: run each to its end.
            trainer.fit_loop.max_batches = float("inf")
            if trainer.val_check_interval == 1.0:
                trainer.val_check_batch = float("inf")
        if isinstance(self._sampler, BatchStream):
            self._sampler._take_back()
        if self._sampler is not None:
            iter(trainer.fit_loop._data_fetcher)  # it had drawn a batch before

    def _scout(
        self,
        module: nn.Module,
        layers: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module that may be the root. If it trains, it is: attach to it."""
        has_grad = torch.is_grad_enabled()
        if not (module.training and has_grad):
            self._is_evaluating = has_grad
            return original(*args, **kwargs)
        self._stop_scouts()
        self._attach(module, layers)
        if self._sampler is not None:
            self._sampler.session = self.session
        return module.forward(*args, **kwargs)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics whenever the trainer writes its logs."""
        del outputs, batch
        if self._scouts is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(_EVALUATES if self._is_evaluating else _CALLS_NOTHING)
        self._count_batch()
        is_last = trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step
        is_whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._metrics is None or not (is_whole or is_last) or trainer.barebones:
            return
        is_written = trainer._logger_connector.should_update_logs
        if is_written or is_last or trainer.fast_dev_run:
            pl_module.log_dict(self._metrics.read())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the report, and detach."""
        del pl_module
        if trainer.is_global_zero:
            self._log_report()
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Detach: training ends here."""
        del trainer, pl_module, exception
        self.detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach, if training ended in another way."""
        del trainer, pl_module
        if stage == "fit":
            self.detach()

    def detach(self) -> None:
        """Restore the module. `session` stays readable."""
        self._stop_scouts()
        super().detach()
        if self._undo_repeats is not None:
            self._undo_repeats()
            self._undo_repeats = None

    def _stop_scouts(self) -> None:
        for scout in reversed(self._scouts or []):
            scout.remove()
        self._scouts = None

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint; it names the module."""
        name = type(self).__qualname__
        return name if self._name is None else f"{name}{{'module': {self._name!r}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data; {} before the first step."""
        learned, batches = self._remember(), self._drawn(on_all=True)
        state = {"learned": learned, "batches": batches}
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what was learned before the checkpoint.

        Args:
            state_dict: What ``state_dict`` returned.
        """
        self.learned = state_dict.get("learned")
        self._batches = state_dict.get("batches")
        if self._attached_to is not None:
            self._recall(self.learned)


def _holders(top: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that have a forward and hold layers, outermost first."""
    wanted = set(map(id, layers))
    return [
        module
        for module in top.modules()
        if id(module) not in wanted
        and any(id(inner) in wanted for inner in module.modules())
        and ("forward" in vars(module) or type(module).forward not in _UNWRITTEN)
    ]


_MAKES = "_make_closure"
"""The method of Lightning's loop that makes a closure. If Lightning renames it, steps
are not repeated."""


def _repeat_closures(
    trainer: Any, module: nn.Module, begin: Callable[..., Attempts | None]
) -> Callable[[], object]:
    """Let a trainer's closures repeat themselves: Note: [The closure].

    Returns:
        A function that restores the trainer.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    make: Any = getattr(loop, _MAKES, None)

    def made(*args: Any, **kwargs: Any) -> Any:
        closure = make(*args, **kwargs)
        closure.closure = _Repeated(closure, module, begin)
        return closure

    if make is not None:
        setattr(loop, _MAKES, made)
    return lambda: vars(loop).pop(_MAKES, None)


class _Repeated:
    """Runs a closure, and repeats it if its backward fails.

    Args:
        made: The closure.
        module: The LightningModule.
        begin: Begins a step that may be repeated.
    """

    def __init__(
        self, made: Any, module: nn.Module, begin: Callable[..., Attempts | None]
    ) -> None:
        self._made = weakref.ref(made)  # a cycle would keep the batch alive
        self._step_fn, self._zero_grad_fn = made._step_fn, made._zero_grad_fn
        self._module: Any = module
        self._begin = begin
        self._step: Any = None
        made._step_fn = self._train
        if self._zero_grad_fn is not None:
            made._zero_grad_fn = self._zero

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = self._made()
        run = type(made).closure
        self._step = TrainersStep(self._module, self._begin)
        return self._step.run(lambda: run(made, *args, **kwargs))

    def _train(self) -> Any:
        if not self._step.n_failed:
            return self._step_fn()
        logs = vars(self._module)
        before = logs.get("log")
        logs["log"] = lambda *_, **__: None  # the first run has logged
        try:
            return self._step_fn()
        finally:
            del logs["log"]
            if before is not None:
                logs["log"] = before

    def _zero(self) -> None:
        if not self._step.n_failed:
            self._zero_grad_fn()
            self._step.note_gradients()
