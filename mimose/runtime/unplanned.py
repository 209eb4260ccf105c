"""Knows what runs past a session, and what to call so that it is planned.

Note: [Past the session]
A session plans the forwards of its model in training mode with grad enabled. All else
runs as without a session, which is right for an evaluation, and silent where a user
means to train. What tells the two apart is an optimizer's step: if nothing was planned
before the first one, or for two in a row later, one message for each cause says what to
call. The report says the same, and all causes if nothing was ever planned.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from mimose.exactness.layer import Layer
from mimose.runtime.optimizers import OptimizerKind

_log = logging.getLogger(__name__)

EVALUATION, NO_GRAD, NO_GRADIENT = "evaluation", "no grad", "no gradient"
"""Causes: forwards of the model that are not planned."""
OUTSIDE = "outside"
"""A cause: calls of layers outside of the model's forward."""
_REPLACED, _COPY, _OTHER = "replaced", "copy", "other"
_MOST_NAMES = 3
_MANY = 8
"""Steps of other optimizers, before the model has run, until a message says so. The
critic of a WGAN takes five before its generator's first."""

_SENTENCES = {
    EVALUATION: (
        "forwards with grad in evaluation mode have no plan (there were {n}): call "
        "model.train() before you train (from_pretrained returns a model in evaluation "
        "mode), and evaluate under torch.no_grad()"
    ),
    NO_GRAD: (
        "forwards with grad disabled have no plan (there were {n}, in training mode): "
        "train outside of torch.no_grad() and torch.inference_mode()"
    ),
    NO_GRADIENT: (
        "the model's outputs need no gradient (in {n} forwards), so no backward "
        "followed: attach to the module whose parameters you train, or unfreeze some "
        "by requires_grad_()"
    ),
    OUTSIDE: (
        "layers that are called outside of the model's forward have no plan (there "
        "were {n} calls): call the attached model itself, or attach to the module "
        "whose forward calls these layers"
    ),
    _REPLACED: (
        "after attach these layers were removed from the model: {names}. What replaced "
        "them has no plan: call mimose.detach(model), and attach again"
    ),
    _COPY: (
        "an optimizer trains other parameters of the same shapes as those of the "
        "attached {model} (in {n} steps). A copy has no session: attach to the model "
        "that you train"
    ),
    _OTHER: (
        "an optimizer trains another model (in {n} steps), and no forward of the "
        "attached {model} ran before: attach to the model that you train"
    ),
}
_NOTHING = (
    "no forward of the model ran in training mode with grad enabled: call the attached "
    "model itself, after model.train()"
)


class Unplanned:
    """Counts what runs past a session, by cause.

    Args:
        model: The model.

    Attributes:
        counts: How often each cause was seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # hooks of all optimizers refer to this
        self._kind = type(model).__name__
        self.counts: Counter[str] = Counter()
        self._replaced: list[str] = []
        self._recent: set[str] = set()
        """Causes since the last planned forward."""
        self._logged: set[str] = set()
        self._is_planned = self._has_planned = self._has_run = False
        """Whether a forward was planned since the last optimizer step, or ever; whether
        the model or one of its layers ran at all."""
        self._n_without = 0
        """Steps of the model's optimizers in a row without a planned forward."""

    def note(self, cause: str) -> None:
        """Count something that ran past the session."""
        self.counts[cause] += 1
        self._recent.add(cause)
        self._has_run = True

    def ran(self) -> None:
        """Record a forward that needs no plan."""
        self._has_run = True

    def planned(self) -> None:
        """Record that a forward of the model ran as a step."""
        self._is_planned = self._has_planned = self._has_run = True
        self._recent.clear()

    def check(self, layers: Iterable[Layer]) -> None:
        """Look for layers that are no longer in the model, whose modules have changed.

        Args:
            layers: The layers that the session plans for.
        """
        model = self._model()
        inside = set() if model is None else set(map(id, model.modules()))
        self._replaced = [e.name for e in layers if id(e.module) not in inside]
        self.counts[_REPLACED] = len(self._replaced)
        if self._replaced:
            self._say(_REPLACED)

    def stepped(self, kind: OptimizerKind) -> None:
        """Say why nothing was planned for some steps of an optimizer.

        Args:
            kind: Whose parameters the optimizer holds.
        """
        if kind == "own":
            self._n_without = 0 if self._is_planned else self._n_without + 1
            self._is_planned = False
            # A model may have two optimizers, and an evaluation between their steps.
            if self._n_without > self._has_planned:
                for cause in self._recent:
                    self._say(cause)
        elif NO_GRADIENT in self._recent:  # the optimizer is of what reads the outputs
            self._say(NO_GRADIENT)
        elif not self._has_run:
            cause = _COPY if kind == "copy" else _OTHER
            self.counts[cause] += 1
            if self.counts[cause] == _MANY:  # others may train before this one
                self._say(cause)

    def finish(self) -> None:
        """Say, as the session ends, why it has planned nothing at all."""
        for cause in +self.counts if not self._has_planned else ():
            self._say(cause)

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each cause, with what to call."""
        for cause in +self.counts:
            if cause in self._logged or not self._has_planned:
                yield self._sentence(cause)
        if not (self._has_planned or +self.counts):
            yield _NOTHING

    def _say(self, cause: str) -> None:
        if cause not in self._logged:
            self._logged.add(cause)
            _log.warning("mimose: %s", self._sentence(cause))

    def _sentence(self, cause: str) -> str:
        n, shown = self.counts[cause], self._replaced[:_MOST_NAMES]
        hidden = len(self._replaced) - len(shown)
        names = ", ".join(shown) + (f" and {hidden} more" if hidden else "")
        return _SENTENCES[cause].format(n=n, names=names, model=self._kind)
