"""What the callbacks of all trainers do alike: they keep a session."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from mimose.arguments import layers_of
from mimose.batch_sampler import BatchSampler
from mimose.budget import Budget
from mimose.exceptions import StateMismatchError
from mimose.report.metrics import MetricsReader
from mimose.runtime.retry import Attempts
from mimose.session import Session, attach

_log = logging.getLogger(__name__)

_owners: weakref.WeakKeyDictionary[nn.Module, SessionCallback]
_owners = weakref.WeakKeyDictionary()
"""Which callback's session has a module."""


class SessionCallback:
    """Attaches to a module for a training, and remembers what was learned.

    Args:
        budget: As for `mimose.attach`.
        options: All others of `mimose.attach`.

    Raises:
        TypeError: `mimose.attach` has no such option.

    Attributes:
        session: The session of the running training, or of the last; None before.
        learned: What a session knew when a checkpoint was written or training ended.
    """

    _not_copied: ClassVar[tuple[str, ...]] = (
        *("session", "_metrics", "_attached_to", "_sampler"),
    )
    """Left out of copies and pickles: a copy of the callback has trained nothing."""

    def __init__(
        self, budget: Budget | Callable[[], Budget], options: Mapping[str, Any]
    ) -> None:
        known = inspect.signature(attach).parameters
        others = {name: o for name, o in options.items() if name not in known}
        layers = layers_of(attach, options.get("layers"), others)
        self._budget = budget
        self._options = {n: o for n, o in options.items() if n not in others}
        self._options["layers"] = layers
        self.session: Session | None = None
        self.learned: dict[str, Any] | None = None
        self._metrics: MetricsReader | None = None
        self._attached_to: nn.Module | None = None
        self._sampler: BatchSampler | None = None
        """Of the running training, where its batches are drawn by one of ours."""
        self._trained = 0, 0
        """An epoch, and its batches that were trained; a loader may be ahead."""
        self._batches: dict[str, Any] | None = None
        """What a sampler knew when the last checkpoint was written."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the session out."""
        return {**self.__dict__, **dict.fromkeys(self._not_copied)}

    def begin_attempts(self, *, is_new: bool = False) -> Attempts | None:
        """Begin the attempts at a step, each run again if it fails; None: not attached.

        Args:
            is_new: Whether the session was made in the midst of the step.
        """
        if self.session is None or self._attached_to is None:
            return None
        return self.session.attempts(is_new=is_new)

    def _attach(
        self, model: nn.Module, layers: Any, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Attach, and go on with what was learned by this callback or before it."""
        owner = _owners.get(model)
        if owner is not None:  # of a trainer that came to no end
            owner.detach()
        session = attach(model, self._budget, **{**self._options, "layers": layers})
        self.session, self._attached_to = session, model
        self._metrics = MetricsReader(session)
        _owners[model] = self
        self._recall(self.learned or saved)

    def _draw(self, loader: Any) -> bool:
        """Have batches drawn by the session, if a loader's sampler is a `BatchSampler`.

        Args:
            loader: The training's.

        Returns:
            Whether it is.
        """
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, BatchSampler) else None
        if self._sampler is None:
            return False
        self._sampler.expect_session()
        self._sampler.session = self.session
        self._trained = self._sampler.epoch, 0
        if self._batches is not None:
            self._sampler.load_state_dict(self._batches)
            self._trained = self._sampler.epoch, self._sampler.n_drawn
        return True

    def _count_batch(self) -> None:
        """Record that a batch was trained."""
        if self._sampler is not None:
            epoch, n_trained = self._trained
            now = self._sampler.epoch
            self._trained = now, (n_trained if now == epoch else 0) + 1

    def _drawn(self) -> dict[str, Any] | None:
        """Return where in its epoch the training is; None where no sampler is ours."""
        if self._sampler is not None:
            self._batches = self._sampler.state_dict(self._trained[1])
        return self._batches

    def _recall(self, learned: Mapping[str, Any] | None) -> None:
        if self.session is None or learned is None:
            return
        try:
            self.session.load_state_dict(learned)
        except StateMismatchError as error:
            _log.warning("mimose: what was learned is of no use here: %s", error)

    def _remember(self) -> dict[str, Any] | None:
        """Return what was learned, up to now."""
        if self.session is not None and self._attached_to is not None:
            self.learned = self.session.state_dict()
        return self.learned

    def _tell(self) -> None:
        """Say in one line how the training went."""
        if self.session is not None and self._attached_to is not None:
            _log.info("%s", self.session.report())

    def detach(self) -> None:
        """Give the module back as it was; `session` can still be read."""
        self._remember()
        if self.session is not None and self._attached_to is not None:
            self.session.detach()
            _owners.pop(self._attached_to, None)
        self._attached_to = None
