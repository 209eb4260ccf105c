"""A callback for the Trainer of transformers: one line, and it trains in a budget."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from mimose.exceptions import (
    CheckpointingConflictError,
    MimoseError,
    NoUnitsError,
    StateMismatchError,
)
from mimose.inputs.compiled import WHY_NOT_WHOLE
from mimose.integrations.missing import missing_package
from mimose.integrations.options import check_options
from mimose.report.metrics import MetricsReader
from mimose.runtime.retry import Repeats
from mimose.session import Session, attach
from mimose.torch_private import COMPILED_MODULE

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

    from mimose.integrations.trainer_guard import callers, guard
except ImportError as error:
    _missing = missing_package(error)
    if _missing not in ("accelerate", "transformers"):
        raise
    _message = (
        f"mimose.integrations.transformers needs transformers and accelerate, and "
        f"{_missing} is missing: pip install 'mimose[transformers]'"
    )
    raise ImportError(_message) from error

_log = logging.getLogger(__name__)

_REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
_YES = ("1", "on", "t", "true", "y", "yes")
"""What accelerate takes for a flag that is set."""
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""A trainer's setting, by its name and by the older one, which has the same value."""

_owners: weakref.WeakKeyDictionary[nn.Module, MimoseCallback]
_owners = weakref.WeakKeyDictionary()
"""Which callback's session has a model."""


class MimoseCallback(TrainerCallback, ExportableState):
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
        options: All others of `mimose.attach`, such as `units`. With
            ``on_infeasible="warn"`` it also trains on, without any plan, where the
            model has no layers to plan for.

    Raises:
        TypeError: `mimose.attach` has no such option.

    Attributes:
        session: The session of the running training, or of the last; None before.
    """

    _given: ClassVar[dict[str, Callable[[], Any]]] = {}
    """What returns arguments that JSON cannot hold, as last given: a trainer that
    restores callbacks from a checkpoint makes this one anew from what JSON can. No
    model is kept alive by it."""

    def __init__(
        self,
        budget: float | str | None = None,
        *,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, budget, options)
        self._budget = budget
        self._options = {n: self._recall(n, value) for n, value in options.items()}
        self._root: nn.Module | None = self._recall("module", module)
        self.session: Session | None = None
        self.learned: dict[str, Any] | None = None
        """What a session knew when a checkpoint was written or training ended."""
        self._model: nn.Module | None = None
        self._metrics: MetricsReader | None = None

    # ------------------------------------------------------------------ events

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a trainer whose settings leave nothing to plan; guard its `train`."""
        del state, control, kwargs
        _refuse_settings(args)
        _, trainer = callers()
        if trainer is not None:
            guard(trainer, MimoseCallback)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Attach to the model, or go on where the trainer has begun anew."""
        del control
        _refuse_settings(args)
        handler, trainer = callers()
        if handler is None or trainer is None:
            _log.warning(
                "mimose: not called by a Trainer's handler: loggers that come before "
                "this callback miss its metrics, and after an exception in training "
                "call its detach()"
            )
        else:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)
            guard(trainer, MimoseCallback)
        model = _running(trainer, kwargs["model"])
        if self._root is not None:
            model = _root_of(self._root, model)
        if not (self._is_attached and self._model is model):
            self.detach()
            owner = _owners.get(model)
            if owner is not None:  # of a trainer that came to no end
                owner.detach()
            self._attach(model, _saved_state(state, type(self).__name__))

    @property
    def _repeats(self) -> Repeats | None:
        """What knows whether a failed step may be run again; None if not attached."""
        if self.session is None or not self._is_attached:
            return None
        return self.session.repeats

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
        if (
            self.session is not None
            and self._is_attached
            and state.is_world_process_zero
        ):
            _log.info("%s", self.session.report())
        self.detach()

    def detach(self) -> None:
        """Give the model back as it was; `session` can still be read."""
        if self.session is not None and self._model is not None:
            self.learned = self.session.state_dict()
            self.session.detach()
            _owners.pop(self._model, None)
        self._model = None

    # ------------------------------------------------------------------ state

    def __getstate__(self) -> dict[str, Any]:
        """Leave the session out: a copy of the callback has trained nothing."""
        own = {"session": None, "_metrics": None, "_model": None}
        return {**self.__dict__, **own}

    def state(self) -> dict[str, Any]:
        """Return the arguments, and what was learned; both ready for JSON."""
        if self.session is not None and self._is_attached:
            self.learned = self.session.state_dict()
        options = {"module": self._root, **self._options}
        args = {"budget": self._budget} | {
            name: _as_json(name, value) for name, value in options.items()
        }
        return {"args": args, "attributes": {"learned": self.learned}}

    @classmethod
    def _recall(cls, name: str, value: Any) -> Any:
        """Keep what JSON cannot hold; find it again where a checkpoint refers to it."""
        if value != {"given": name}:
            if isinstance(value, nn.Module):
                cls._given[name] = weakref.ref(value)
            elif _as_json(name, value) == {"given": name}:
                cls._given[name] = lambda: value
            return value
        found = cls._given.get(name, lambda: None)()
        if found is None:
            msg = (
                f"the checkpoint was written with an object for {name}, which JSON "
                f"cannot hold; make a MimoseCallback with it before you resume"
            )
            raise MimoseError(msg)
        return found

    # ------------------------------------------------------------------ attaching

    @property
    def _is_attached(self) -> bool:
        return self._model is not None

    def _attach(self, model: nn.Module, saved: Mapping[str, Any] | None) -> None:
        self.session = self._metrics = None
        try:
            session = attach(model, self._budget, **self._options)
        except NoUnitsError as error:
            raises = self._options.get("on_infeasible", "raise") == "raise"
            if raises or self._options.get("units") is not None:
                raise
            _log.warning("mimose: this training is not planned: %s", error)
            return
        self.session, self._model = session, model
        self._metrics = MetricsReader(session)
        _owners[model] = self
        problem = ""
        for learned in (self.learned, saved):
            if learned is None:
                continue
            try:
                session.load_state_dict(learned)
            except StateMismatchError as error:
                problem = str(error)
            else:
                return
        if problem:
            _log.warning("mimose: what was learned is of no use here: %s", problem)


def _refuse_settings(args: Any) -> None:
    """Refuse settings under which a second owner would decide what is recomputed.

    Raises:
        CheckpointingConflictError: The trainer's own checkpointing is switched on.
        MimoseError: The model is to be compiled.
    """
    for name in _CHECKPOINTING:
        if getattr(args, name, False):
            raise CheckpointingConflictError(_why_not_both(args, name))
    is_regional = os.environ.get(_REGIONAL, "").lower() in _YES
    if getattr(args, "torch_compile", False) and not is_regional:
        msg = (
            f"TrainingArguments(torch_compile=True) compiles the model as a whole, and "
            f"{WHY_NOT_WHOLE}; with a Trainer, set the environment variable "
            f"{_REGIONAL}=1"
        )
        raise MimoseError(msg)


def _why_not_both(args: Any, name: str) -> str:
    """Say what to set where a trainer's own checkpointing is on.

    It may be on although nobody asked for it: the configurations of TRL have another
    default than `TrainingArguments`, by the setting's older name.
    """
    kind = type(args)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    is_default = any(f.name in _CHECKPOINTING and f.default is True for f in fields)
    by_default = ", which is its default," if is_default else ""
    return (
        f"{kind.__name__} has {name}=True{by_default} and MimoseCallback decides what "
        f"is recomputed, too: set {kind.__name__}(..., {name}=False), and mimose "
        f"recomputes what it must"
    )


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


def _saved_state(state: Any, name: str) -> Mapping[str, Any] | None:
    """Return what a callback of this name has saved with the checkpoint, if any."""
    saved = (state.stateful_callbacks or {}).get(name)
    if isinstance(saved, list):
        saved = saved[-1] if saved else None
    return None if saved is None else saved.get("attributes", {}).get("learned")


def _as_json(name: str, value: Any) -> Any:
    """Return what a checkpoint can hold of an argument; else a reference to it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        value = dict(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return {"given": name}
    return value
