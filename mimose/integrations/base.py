"""The common base of the trainers' callbacks: it holds a session."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import distributed, nn

from mimose.arguments import layers_of, raise_if_unknown
from mimose.batch_sampler import BatchSampler
from mimose.batch_stream import BatchStream
from mimose.budget import Budget
from mimose.distributed import own_rank
from mimose.exceptions import StateMismatchError
from mimose.records import PHASES
from mimose.report.metrics import MetricsReader
from mimose.runtime.retry import Attempts
from mimose.session import Session, attach, attach_arguments

_log = logging.getLogger(__name__)


class SessionCallback:
    """Attaches to a module during a training, and keeps what was learned.

    Args:
        budget: As for `mimose.attach`.
        options: All other arguments of `mimose.attach`; and ``learned``, what
            `Session.state_dict` returned or `rehearse` saved, or the file of it.

    Raises:
        TypeError: `mimose.attach` has no such argument.
        OSError: The file cannot be read.

    Attributes:
        session: The session of the present training, or of the last one; None before.
        learned: The state of the session at the last checkpoint or the end of training.
    """

    def __init__(
        self, budget: Budget | Callable[[], Budget], options: Mapping[str, Any]
    ) -> None:
        learned, options = options.get("learned"), dict(options)
        options.pop("learned", None)
        if isinstance(learned, (str, PathLike)):
            learned = json.loads(Path(learned).read_text(encoding="utf-8"))
        known = attach_arguments()
        others = {name: o for name, o in options.items() if name not in known}
        caller = type(self).__name__
        raise_if_unknown(others, [*known, "learned", "module"], caller)
        layers = layers_of(options.get("layers"), options.get("units"), caller)
        self._budget = budget
        own = {name: o for name, o in options.items() if name != "units"}
        self._options: dict[str, Any] = own | {"layers": layers}
        self.session: Session | None = None
        self.learned: dict[str, Any] | None = None
        self._given: dict[str, Any] | None = learned
        self._metrics: MetricsReader | None = None
        self._attached_to: nn.Module | None = None
        self._sampler: BatchSampler | BatchStream | None = None
        """What draws the training's batches, if it is of mimose."""
        self._trained = 0, 0
        """The epoch, and how many of its batches were trained; a loader draws ahead."""
        self._batches: dict[str, Any] | None = None
        """The sampler's state at the last checkpoint; of a stream on several ranks,
        those of all."""

    def begin_attempts(self, *, is_new: bool = False) -> Attempts | None:
        """Begin a step that may be repeated; None if no session is attached.

        Args:
            is_new: Whether the session was made during the step.
        """
        if self.session is None or self._attached_to is None:
            return None
        return self.session._attempts(is_new=is_new)

    def _attach(
        self, model: nn.Module, layers: Any, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Attach, and load what this callback, a checkpoint or ``learned`` knows."""
        session = attach(model, self._budget, **{**self._options, "layers": layers})
        self.session, self._attached_to = session, model
        self._metrics = MetricsReader(session)
        legend = ", ".join(f"{i} {phase}" for i, phase in enumerate(PHASES))
        _log.info("mimose: mimose/phase in the logs is a number: %s", legend)
        self._recall(self.learned or saved or self._given)

    def _draw(self, loader: Any) -> bool:
        """Give the session to what draws the batches, if that is of mimose.

        Args:
            loader: The training's loader.

        Returns:
            Whether it is.
        """
        kinds = BatchSampler, BatchStream
        each = loader if isinstance(loader, kinds) else None
        each = getattr(loader, "batch_sampler", each)
        self._sampler = each if isinstance(each, kinds) else None
        if self._sampler is None:
            return False
        self._sampler.is_expecting = True
        self._sampler.session = self.session
        self._trained = self._sampler.epoch, 0
        if self._batches is not None:
            rank, _ = own_rank(None, None)
            states = self._batches.get("ranks") or [self._batches]
            self._sampler.load_state_dict(states[rank % len(states)])
            self._trained = self._sampler.epoch, self._sampler.n_drawn
        return True

    def _count_batch(self, n_open: int = 0) -> None:
        """Record that a batch was trained.

        Args:
            n_open: How many batches of the epoch before were not trained yet when the
                sampler's present epoch began.
        """
        if self._sampler is not None:
            epoch, n_trained = self._trained
            now = self._sampler.epoch
            self._trained = now, (n_trained if now == epoch else -n_open) + 1

    def _drawn(self, *, on_all: bool = False) -> dict[str, Any] | None:
        """Return the sampler's state; None without one of mimose.

        Args:
            on_all: Whether all ranks call this together. Only then the state of a
                stream on several ranks is read, which differs by rank.
        """
        _, n_ranks = own_rank(None, None)
        is_of_each = isinstance(self._sampler, BatchStream) and n_ranks > 1
        if self._sampler is not None and (on_all or not is_of_each):
            self._batches = self._sampler.state_dict(max(0, self._trained[1]))
            if is_of_each:
                states: list[Any] = [None] * n_ranks
                distributed.all_gather_object(states, self._batches)
                self._batches = {"ranks": states}
        return self._batches

    def _recall(self, learned: Mapping[str, Any] | None) -> None:
        if self.session is None or learned is None:
            return
        try:
            self.session.load_state_dict(learned)
        except StateMismatchError as error:
            _log.warning(
                "mimose: the saved state cannot be used here, and the "
                "session learns anew: %s",
                error,
            )

    def _remember(self) -> dict[str, Any] | None:
        """Return what was learned so far."""
        if self.session is not None and self._attached_to is not None:
            self.learned = self.session.state_dict()
        return self.learned or self._given

    def _log_report(self) -> None:
        """Log the session's report."""
        if self.session is not None and self._attached_to is not None:
            _log.info("%s", self.session.report())

    def detach(self) -> None:
        """Restore the module. `session` stays readable."""
        self._remember()
        if self.session is not None and self._attached_to is not None:
            self.session.detach()
        self._attached_to = None
