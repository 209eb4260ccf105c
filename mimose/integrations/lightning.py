"""A callback for Lightning's Trainer: one line, and it trains in a budget.

It works with `lightning.pytorch` and with `pytorch_lightning`, whichever is installed.

Note: [When]
The session attaches after `on_train_start`: the strategy has moved the model by then,
every checkpoint is loaded and the sanity check is done. It detaches in `on_train_end`,
before the strategy moves the model away, or in `on_exception`.
"""

from __future__ import annotations

import copy
import importlib
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mimose.exceptions import MimoseError, StateMismatchError
from mimose.inputs.compiled import WHY_NOT_WHOLE
from mimose.integrations.options import check_options
from mimose.integrations.repeated_closure import RepeatedClosures
from mimose.integrations.root_search import RootSearch
from mimose.report.metrics import MetricsReader
from mimose.runtime.retry import Repeats
from mimose.session import Session, attach

_log = logging.getLogger(__name__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _installed() -> list[Any]:
    """Import whichever is installed; a Trainer takes callbacks of its own package.

    Raises:
        ImportError: None is.
    """
    found = []
    for name in _PACKAGES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise  # it is installed, and something that it needs is not
    if not found:
        msg = (
            "mimose.integrations.lightning needs lightning or pytorch_lightning: "
            "pip install 'mimose[lightning]'"
        )
        raise ImportError(msg)
    return found


_libraries = _installed()
_UNWRITTEN = {nn.Module.forward, *[each.LightningModule.forward for each in _libraries]}
"""The forwards of modules that have none of their own."""

if TYPE_CHECKING:
    _Base = object
else:
    _Base = type("_Base", tuple(each.Callback for each in _libraries), {})

_busy: weakref.WeakKeyDictionary[nn.Module, list[MimoseCallback]]
_busy = weakref.WeakKeyDictionary()
"""The callbacks that watch a LightningModule, or have attached to a part of it."""


class MimoseCallback(_Base):
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
        options: All others of `mimose.attach`. Names of `units` are seen from `module`,
            or else from the LightningModule.

    Raises:
        TypeError: `mimose.attach` has no such option.

    Attributes:
        session: The session of the running training, or of the last; None before the
            first step.
    """

    def __init__(
        self,
        budget: float | str | None = None,
        *,
        module: str | None = None,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, budget, options)
        self._budget = budget
        self._name = module
        self._units = options.pop("units", None)
        self._options = options
        self.session: Session | None = None
        self.learned: dict[str, Any] | None = None
        """What a session knew when a checkpoint was written or training ended."""
        self._metrics: MetricsReader | None = None
        self._whole: nn.Module | None = None
        """The LightningModule, while this watches it or is attached."""
        self._search: RootSearch | None = None
        self._is_attached = False
        self._has_warned = False
        self._closures: RepeatedClosures | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the session out: a copy of the callback has trained nothing."""
        own = {"session": None, "_metrics": None, "_whole": None, "_search": None}
        own["_closures"] = None
        return {**self.__dict__, **own, "_is_attached": False}

    # ------------------------------------------------------------------ events

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a `training_step` that is compiled, and so leaves nothing to plan.

        Raises:
            MimoseError: It is.
        """
        if stage != "fit":
            return
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            msg = f"the LightningModule's training_step is compiled: {WHY_NOT_WHOLE}"
            raise MimoseError(msg)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch for the root: see `mimose.integrations.root_search`.

        Raises:
            NoUnitsError: No layers were found.
            MimoseError: No module has the name that was given.
        """
        self.detach()
        for other in list(_busy.get(pl_module, ())):
            if other not in trainer.callbacks:
                other.detach()  # of a trainer that came to no end
        self._has_warned = False
        self._metrics = None
        self._search = RootSearch(
            pl_module, self._name, self._units, _UNWRITTEN, self._attach
        )
        self._whole = pl_module
        _busy.setdefault(pl_module, []).append(self)
        if trainer.world_size == 1 and _busy[pl_module] == [self]:
            self._closures = RepeatedClosures(trainer, pl_module, self._repeats)

    def _repeats(self) -> Repeats | None:
        if self.session is None or not self._is_attached:
            return None
        return self.session.repeats

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics, where the trainer writes what is logged."""
        del outputs, batch
        if self._search is not None:
            self._say_unseen(self._search)
        is_last = _is_last(trainer)
        is_whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._metrics is None or not (is_whole or is_last) or trainer.barebones:
            return
        if trainer._logger_connector.should_update_logs or trainer.fast_dev_run:
            pl_module.log_dict(self._metrics.read())
        elif is_last:  # for callback_metrics; the loggers get these steps later
            pl_module.log_dict(copy.copy(self._metrics).read())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach, and say in one line how it went."""
        del pl_module
        if self.session is not None and self._is_attached and trainer.is_global_zero:
            _log.info("%s", self.session.report())
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
        if self._search is not None:
            self._search.stop()
            self._search = None
        if self.session is not None and self._is_attached:
            self.learned = self.session.state_dict()
            self.session.detach()
        self._is_attached = False
        if self._closures is not None:
            self._closures.remove()
            self._closures = None
        if self._whole is not None:
            others = [other for other in _busy.pop(self._whole) if other is not self]
            if others:
                _busy[self._whole] = others
            self._whole = None

    # ------------------------------------------------------------------ state

    @property
    def state_key(self) -> str:
        """Tell the state apart from that of a callback for another module."""
        name = type(self).__qualname__
        return name if self._name is None else f"{name}{{'module': {self._name!r}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, ready for JSON; {} before the first step."""
        if self.session is not None and self._is_attached:
            self.learned = self.session.state_dict()
        return {} if self.learned is None else {"learned": self.learned}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was learned before the checkpoint was written.

        Args:
            state_dict: What ``state_dict`` returned.
        """
        self.learned = state_dict.get("learned")
        if self._is_attached:
            self._recall()

    # ------------------------------------------------------------------ attaching

    def _attach(self, root: nn.Module, units: Any) -> None:
        self._search = None
        session = attach(root, self._budget, units=units, **self._options)
        self.session, self._is_attached = session, True
        self._metrics = MetricsReader(session)
        self._recall()

    def _recall(self) -> None:
        if self.session is None or self.learned is None:
            return
        try:
            self.session.load_state_dict(self.learned)
        except StateMismatchError as error:
            _log.warning("mimose: what was learned before is of no use here: %s", error)

    def _say_unseen(self, search: RootSearch) -> None:
        """Say, after the first step, that nothing is planned so far."""
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "mimose: training_step ran none of the layers that were found (%s, ...), "
            "so nothing is planned so far. If it trains other modules, name the one "
            "to plan for with MimoseCallback(module=...)",
            search.first_unit,
        )


def _is_last(trainer: Any) -> bool:
    """Return whether an epoch or the training ends with this batch."""
    return bool(trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step)
