"""A callback for Lightning's Trainer: one line, and it trains in a budget.

It works with `lightning.pytorch` and with `pytorch_lightning`, whichever is installed.

Note: [The root]
A step is one forward of a module, the root. Lightning calls `training_step`, which may
call the LightningModule itself, or a model in it, or two, and it is not known which
before it does: so the callback does not guess. When training starts it looks for the
layers, and watches the forwards of all modules that hold some. The first of them that
is called in training mode, with grad enabled, is the root: the outermost one, for a
module is called before those inside it. The session attaches in that call, and so even
the first step is within the budget.

`training_step` itself is not taken for the root: it logs, appends to lists, and in
manual optimization runs backwards and optimizers, so it must not be run again when a
forward fails.

Note: [The closure]
In automatic optimization Lightning makes a closure for each batch, which runs
`training_step`, zeroes the gradients and runs the backward. It calls that itself where
it accumulates, and else hands it to `optimizer_step` and the precision's plugin. So it
is as it is made that it learns to repeat itself. A second run finds no gradients, so
there is nothing to zero, and has logged before.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mimose.budget import Budget
from mimose.exceptions import MimoseError
from mimose.inputs.compiled import WHY_NOT_WHOLE
from mimose.inputs.layers import find_layers
from mimose.inputs.patch import Patch
from mimose.integrations.base import SessionCallback
from mimose.runtime.retry import Attempts, TrainersStep

_log = logging.getLogger(__name__)


def _installed() -> list[Any]:
    """Import whichever is installed; a Trainer takes callbacks of its package.

    Raises:
        ImportError: None is.
    """
    found = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            missing = error
    if not found:
        msg = (
            "mimose.integrations.lightning needs lightning or pytorch_lightning: "
            "pip install 'mimose[lightning]'"
        )
        raise ImportError(msg) from missing
    return found


_libraries = _installed()
_UNWRITTEN = {nn.Module.forward, *[each.LightningModule.forward for each in _libraries]}
"""The forwards of modules that define none."""

if TYPE_CHECKING:
    _Base = object
else:
    _Base = type("_Base", tuple(each.Callback for each in _libraries), {})


class MimoseCallback(SessionCallback, _Base):
    """Keeps the steps of `Trainer.fit` within a memory budget.

    ::

        trainer = Trainer(callbacks=[MimoseCallback(budget="6GiB")])
        trainer.fit(model, data)

    It attaches in the first training step, to the outermost module that holds layers
    and that `training_step` calls: the LightningModule itself (``self(batch)``) or the
    model in it (``self.model(batch)``). It detaches when training ends, however it
    ends; validation passes through. `mimose/...` metrics (see
    `mimose.report.metrics.MetricsReader`) reach `trainer.callback_metrics` and
    the loggers every `log_every_n_steps`. What was learned is saved with each
    checkpoint, and a run that is resumed from one plans from its first step on.

    Args:
        budget: As for `mimose.attach`.
        module: The name in the LightningModule of the module to attach to, where the
            first that is called is not the one: ``"generator"``.
        options: All others of `mimose.attach`. Names of `layers` are seen from
            `module`, or else from the LightningModule.

    Raises:
        TypeError: `mimose.attach` has no such option.

    Attributes:
        session: The session of the running training, or of the last; None before the
            first step.
    """

    _not_copied = (*SessionCallback._not_copied, "_scouts", "_undo_repeats")

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
        """On the modules that may be the root, until it is found."""
        self._undo_repeats: Callable[[], object] | None = None
        self._has_warned = False

    # ------------------------------------------------------------------ calls

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a `training_step` that is compiled, and so leaves nothing to plan.

        Raises:
            MimoseError: It is.
        """
        del trainer
        if stage == "fit" and getattr(pl_module, "_compiler_ctx", None) is not None:
            msg = f"the LightningModule's training_step is compiled: {WHY_NOT_WHOLE}"
            raise MimoseError(msg)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch for the root: see Note: [The root].

        Raises:
            NoUnitsError: No layers were found.
            MimoseError: No module has the name that was given.
        """
        self.detach()
        self._has_warned, self._metrics = False, None
        top = pl_module if self._name is None else _module_named(pl_module, self._name)
        layers = self._options["layers"]
        found = [module for _, module in find_layers(top, layers)]
        if layers is not None and self._name is None:  # names are others in the root
            chosen = set(map(id, found))

            def layers(module: nn.Module) -> bool:
                return id(module) in chosen

        trained = [layer for layer in found if any(_trained(layer))] or found
        roots = [top] if self._name is not None else _holders(top, trained)
        self._scouts = [
            Patch(each, partial(self._scout, each, layers)) for each in roots
        ]
        own = [each for each in trainer.callbacks if isinstance(each, MimoseCallback)]
        if trainer.world_size == 1 and len(own) <= 1:
            begin = self.begin_attempts
            self._undo_repeats = _repeat_closures(trainer, pl_module, begin)
        if self._draw(trainer.train_dataloader) and trainer.limit_train_batches == 1.0:
            # A loader knows the length of one epoch at most: each goes to its end.
            trainer.fit_loop.max_batches = float("inf")
            if trainer.val_check_interval == 1.0:
                trainer.val_check_batch = float("inf")
        if self._sampler is not None:
            iter(trainer.fit_loop._data_fetcher)  # it has drawn a batch already

    def _scout(
        self,
        module: nn.Module,
        layers: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module that may be the root: in training it is, and attached to."""
        if not (module.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        self._stop_scouts()
        self._attach(module, layers)
        if self._sampler is not None:
            self._sampler.session = self.session
        return module.forward(*args, **kwargs)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics, where the trainer writes what is logged."""
        del outputs, batch
        if self._scouts is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "mimose: training_step called no module that holds layers, so nothing "
                "is planned so far. Call the model, or self(batch), in training_step; "
                "or name the module to plan for with MimoseCallback(module=...)"
            )
        self._count_batch()
        is_last = trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step
        is_whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._metrics is None or not (is_whole or is_last) or trainer.barebones:
            return
        is_written = trainer._logger_connector.should_update_logs
        if is_written or is_last or trainer.fast_dev_run:
            pl_module.log_dict(self._metrics.read())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach, and say in one line how it went."""
        del pl_module
        if trainer.is_global_zero:
            self._tell()
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Detach: training ends here."""
        del trainer, pl_module, exception
        self.detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach where training ended in no other way."""
        del trainer, pl_module
        if stage == "fit":
            self.detach()

    def detach(self) -> None:
        """Give the module back as it was; `session` can still be read."""
        self._stop_scouts()
        super().detach()
        if self._undo_repeats is not None:
            self._undo_repeats()
            self._undo_repeats = None

    def _stop_scouts(self) -> None:
        for scout in reversed(self._scouts or []):
            scout.remove()
        self._scouts = None

    # ------------------------------------------------------------------ state

    @property
    def state_key(self) -> str:
        """Tell the state apart from that of a callback for another module."""
        name = type(self).__qualname__
        return name if self._name is None else f"{name}{{'module': {self._name!r}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, ready for JSON; {} before the first step."""
        learned, batches = self._remember(), self._drawn()
        state = {"learned": learned, "batches": batches}
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was learned before the checkpoint was written.

        Args:
            state_dict: What ``state_dict`` returned.
        """
        self.learned = state_dict.get("learned")
        self._batches = state_dict.get("batches")
        if self._attached_to is not None:
            self._recall(self.learned)


# ------------------------------------------------------------------ the root


def _module_named(whole: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(whole.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        msg = f"module: no module named {name!r} in {type(whole).__name__}{hint}"
        raise MimoseError(msg)
    return modules[name]


def _trained(module: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


def _holders(top: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules with a forward that layers are in, outermost first."""
    wanted = set(map(id, layers))
    return [
        module
        for module in top.modules()
        if id(module) not in wanted
        and any(id(inner) in wanted for inner in module.modules())
        and ("forward" in vars(module) or type(module).forward not in _UNWRITTEN)
    ]


# ------------------------------------------------------------------ repeated steps

_MAKES = "_make_closure"
"""The method of Lightning's loop that makes a closure. If it were another, no step of
Lightning's would be run again."""


def _repeat_closures(
    trainer: Any, module: nn.Module, begin: Callable[..., Attempts | None]
) -> Callable[[], object]:
    """Let a trainer's closures run again: see Note: [The closure].

    Returns:
        What gives the trainer back as it was.
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
    """A closure's run, repeated if its backward fails; in place of the trainer's.

    Args:
        made: The closure.
        module: The LightningModule.
        begin: Begins the session's attempts at a step.
    """

    def __init__(
        self, made: Any, module: nn.Module, begin: Callable[..., Attempts | None]
    ) -> None:
        self._made = weakref.ref(made)  # in a cycle it would hold the batch
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
