"""Whether a step whose backward has failed is run again, and how it is undone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.utils.checkpoint import CheckpointError

from mimose.budget import format_bytes
from mimose.distributed import is_told_alone, tell_alone, why_step_waits
from mimose.exactness.random_state import RandomState, accelerators_of
from mimose.exceptions import RecomputationError
from mimose.memory.out_of_memory import asked_bytes, is_out_of_memory
from mimose.runtime.engine import Engine
from mimose.tensors import version

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Repeats:
    """Decides whether a step that failed is run again.

    Args:
        model: The root.
        engine: Its session's.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = weakref.ref(model)  # a session outlives it
        self._engine = engine

    def begin(self, *, is_new: bool = False) -> Attempts:
        """Return what is asked when an attempt at the step to come has failed.

        Args:
            is_new: Whether the session was made in the midst of the step.
        """
        model = self._model()
        assert model is not None
        return Attempts(model, self._engine, is_new=is_new)


class Attempts:
    """The attempts at one step.

    Args:
        model: The root.
        engine: Its session's.
        is_new: Whether the session was made in the midst of the step.
    """

    def __init__(self, model: nn.Module, engine: Engine, *, is_new: bool) -> None:
        self._model = model
        self._engine = engine
        self._n_kept = 0 if is_new else len(engine.findings.kept)
        self._n_begun = 0 if is_new else self._count_forwards()
        self._has_run_out = False

    def _count_forwards(self) -> int:
        return self._engine.driver.n_begun

    @property
    def has_one_forward(self) -> bool:
        """Whether the attempt has run one forward, which the session can undo."""
        return self._count_forwards() == self._n_begun + 1

    def can_follow(self, error: RuntimeError) -> bool:
        """Whether another attempt may come out otherwise; the next step is the safest.

        Args:
            error: What the last one has raised.
        """
        if not self._is_ours(error) or self._is_waited_for(error):
            return False
        n_kept, runs_out = len(self._engine.findings.kept), is_out_of_memory(error)
        if self._has_run_out if runs_out else n_kept == self._n_kept:
            return False
        self._has_run_out = self._has_run_out or runs_out
        self._n_kept, self._n_begun = n_kept, self._count_forwards()
        _log.warning(
            "mimose: a step failed (%s) and is run again", type(error).__name__
        )
        return True

    def prepare(self) -> None:
        """Let the next step recompute all; with no reference to the error left."""
        self._engine.driver.prepare_safest()

    def undo_forward(self) -> None:
        """Put back what the last forward has changed."""
        self._engine.rollback.restore()

    def _is_ours(self, error: RuntimeError) -> bool:
        """Whether a plan may be what it comes from."""
        unit = self._engine.findings.last_recomputed
        if isinstance(error, RecomputationError):
            return True  # its layer is kept by now
        if isinstance(error, CheckpointError) and unit is not None:
            why = "recomputing it gave other tensors"
            self._engine.findings.keep_alike(unit, why)
            return True
        if is_out_of_memory(error):
            self._engine.footprint.ran_out(asked_bytes(error))
            return True
        return False

    def _is_waited_for(self, error: RuntimeError) -> bool:
        """Whether other ranks take part in the step; then the error says so."""
        why = why_step_waits(self._model, self._engine.units)
        if why and not is_told_alone(error):
            held = format_bytes(self._engine.footprint.least_bytes())
            budget = format_bytes(self._engine.budget_bytes)
            numbers = f"{held} are held now, of {budget}."
            tell_alone(error, "the step", why, numbers)
        return bool(why)


class TrainersStep:
    """A step in somebody else's loop, run again where that takes no copy of anything.

    Unlike `Session.step` it saves random state alone, and leaves it to the session to
    undo the forward. So it is not run again where gradients were there before it, or
    where it has run several forwards or changed weights.

    Args:
        model: What is trained.
        repeats: Returns the session's, as soon as there is one.
    """

    def __init__(self, model: nn.Module, repeats: Callable[[], Repeats | None]) -> None:
        self._model = model
        self._repeats = repeats
        self._random = RandomState(accelerators_of(model))
        self._versions: list[int] | None = None
        """Of the weights; None where they had gradients."""
        self.n_failed = 0
        """Attempts that are undone by now."""

    def note_gradients(self) -> None:
        """Take note that the backward begins with the gradients that are there now."""
        weights = list(self._model.parameters())
        is_clean = all(weight.grad is None for weight in weights)
        self._versions = list(map(version, weights)) if is_clean else None

    def run(self, attempt: Callable[[], _Result]) -> _Result:
        """Run forward and backward, as often as another attempt may help.

        Args:
            attempt: Runs them.

        Raises:
            RuntimeError: It failed in another way, or cannot be run again.
        """
        found = self._repeats()
        attempts = None if found is None else found.begin()
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                found = self._repeats()
                if found is None:
                    raise
                attempts = attempts or found.begin(is_new=True)
                is_undoable = attempts.has_one_forward and self._has_weights()
                if not (is_undoable and attempts.can_follow(error)):
                    raise
            self.n_failed += 1
            attempts.prepare()
            attempts.undo_forward()
            self._random.restore()
            for weight in self._model.parameters():
                weight.grad = None

    def _has_weights(self) -> bool:
        """Whether the weights are those that the step began with."""
        return self._versions == list(map(version, self._model.parameters()))
