"""Whether a step's loss goes by rows, decided with its plan.

By rows a loss takes a third of the memory, and each log-softmax twice. So it goes by
rows where a plain one would have layers recomputed, and where nobody knows what a plain
one takes. Each way is a context of its own; the plain one is learned in steps that have
room for it, whatever it takes.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.cost.learner import Learner
from mimose.exceptions import InfeasibleBudgetError
from mimose.inputs.describe import Describer
from mimose.loss_by_rows import LEAST_BYTES, late
from mimose.memory.wall import Footprint
from mimose.policy.decision import Decision
from mimose.runtime.step import Step
from mimose.runtime.window import Window
from mimose.types import Sizes, StepInput

_LARGE_LOGITS = 1 / 64
"""Logits of a smaller share of the budget decide no plan: their loss is left alone."""
_COPIES = 4
"""Of logits in float32: so many a plain loss holds beyond one by rows, at the most."""
_MOST_UNTOLD = 16
"""Steps that a plain loss gets to be learned in: of one that no fit explains they would
have no end."""
_ROWS_COST = 0.1
"""Layers that could as well be recomputed, as a share of all: what rows cost. It is 0.3
of Llama-1B's on the hollow H100, and 0.03 of Llama-8B's."""
_MOST_SHAPES = 256
"""Whose logits are remembered."""

_OWN = "_loss_function"
"""Where a model of transformers keeps the loss function that it was given."""

Decide: TypeAlias = Callable[[StepInput], Decision]


class LossByRows:
    """The loss function of a model of transformers, until `remove`.

    Such a model asks itself for the function that computes its loss (`loss_function`),
    and can be given another. That function runs as it is, with logits in which
    cross-entropy goes by rows, in a forward and where a layer runs it again. Copies and
    pickles of the model have the function itself.

    Args:
        module: The model.

    Attributes:
        is_on: Whether the next loss goes by rows.
        went_by_rows: Whether one has, since whoever sets `is_on` looked last.
        logit_bytes: Of the largest logits since then, were they in float32.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._given = vars(module).get(_OWN)
        self.is_on = self.went_by_rows = False
        self.logit_bytes = 0
        setattr(module, _OWN, self)

    @property
    def can_go_by_rows(self) -> bool:
        """Whether the model's loss, as of now, is a function of transformers'."""
        is_in_place = vars(self._module).get(_OWN) is self
        return is_in_place and _is_theirs(self._original())

    def remove(self) -> None:
        """Give the model its own back, unless somebody has given it another."""
        self.is_on, state = False, vars(self._module)
        if state.get(_OWN) is self:
            del state[_OWN]
            if self._given is not None:
                state[_OWN] = self._given

    def _original(self) -> Any:
        """Return what the model was given, or what its class chooses as of now."""
        if self._given is not None:
            return self._given
        without: Any = object.__new__(type(self._module))
        state = vars(self._module).items()
        vars(without).update((name, value) for name, value in state if name != _OWN)
        return without.loss_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        original = self._original()
        if not torch.compiler.is_compiling() and _is_theirs(original):
            sizes = map(_n_logits, (*args, *kwargs.values()))
            self.logit_bytes = max(self.logit_bytes, 4 * max(sizes, default=0))
            if self.is_on:
                args = tuple(map(self._late, args))
                kwargs = {name: self._late(value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    def _late(self, value: Any) -> Any:
        if not _n_logits(value) or value.nbytes < LEAST_BYTES:
            return value
        self.went_by_rows = True
        return late(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give the function itself to copies of the model."""
        del memo
        return self._original()

    def __reduce__(self) -> Any:
        """Pickle as the function itself."""
        return _itself, (self._original(),)


def _itself(value: Any) -> Any:
    return value


def modules_with_loss(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute their loss by a function of transformers'."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        takes = inspect.signature(module.forward).parameters
        if "labels" in takes and _is_theirs(getattr(module, "loss_function", None)):
            yield module


def _n_logits(value: Any) -> int:
    is_tensor = type(value) is torch.Tensor and value.is_floating_point()
    return value.numel() if is_tensor else 0


def _is_theirs(function: Any) -> bool:
    name = getattr(function, "__module__", None) or ""
    return callable(function) and name.startswith("transformers.")


class LossChoice:
    """Decides how the losses of a model's steps are computed.

    Args:
        describer: Tells a step by rows from a plain one.
        learner: Knows which of them was measured.
        footprint: Counts the bytes of either.
        budget_bytes: The budget.

    Attributes:
        losses: Those of the model that may go by rows; none in a baseline.
        is_probing: Whether a decision is asked for that may not be taken.
        has_probed: Whether that of the last step was.
    """

    def __init__(
        self,
        describer: Describer,
        learner: Learner,
        footprint: Footprint,
        budget_bytes: int,
    ) -> None:
        self._describer = describer
        self._learner = learner
        self._footprint = footprint
        self._budget_bytes = budget_bytes
        self.losses: Sequence[LossByRows] = ()
        self.is_probing = self.has_probed = False
        self._goes_by_rows = False
        self._may_choose = False
        """Whether some loss may go by rows, as the step began; ..."""
        self._most = math.inf
        """... and its logits at the most, from which it is told whether ..."""
        self._is_small = False
        """... they are too small to decide a plan."""
        self._n_untold = 0
        self._logit_bytes: dict[Sizes, int] = {}
        """By shape, of logits in float32."""

    @property
    def can_go_by_rows(self) -> bool:
        """Whether some loss may go by rows as of now."""
        return any(loss.can_go_by_rows for loss in self.losses)

    def begin(self, facts: StepInput, *, is_first: bool) -> StepInput | None:
        """Look at a step that begins, once for all that is asked of it.

        Args:
            facts: The step.
            is_first: Whether it is the session's first.

        Returns:
            The step with the loss that takes least; None where none is known yet.
        """
        self._may_choose = self.can_go_by_rows
        if not self._may_choose:
            return facts
        self._look(facts.sizes)
        if self._is_small:
            return facts
        if not self._logit_bytes:
            return None if is_first else facts
        return self._describer.by_rows(facts)

    def decide(
        self, facts: StepInput, window: Window, decide: Decide, *, is_again: bool
    ) -> tuple[StepInput, Decision]:
        """Decide for the loss that costs less.

        Args:
            facts: What is known of the step.
            window: Its window.
            decide: Decides for a step with one loss or the other.
            is_again: Whether the step is run again.

        Returns:
            What is known of the step with that loss, and the decision.

        Raises:
            InfeasibleBudgetError: The budget cannot be kept with either.
        """
        self.has_probed = False
        if not self._may_choose:
            self._use(window, is_by_rows=False)
            return facts, decide(facts)
        by_rows = self._describer.by_rows(facts)
        if is_again or (window.steps and self._goes_by_rows):
            self._use(window, is_by_rows=True)
            return by_rows, decide(by_rows)
        if window.steps or not self._logit_bytes or self._is_small:
            self._use(window, is_by_rows=False)
            # Before any logits were seen they may be large: so they go by rows.
            self._goes_by_rows = not self._logit_bytes
            return facts, decide(facts)
        self._use(window, is_by_rows=True)
        found = decide(by_rows)
        plain = self._plain(facts, window, decide, found)
        return (by_rows, found) if plain is None else (facts, plain)

    def _plain(
        self, facts: StepInput, window: Window, decide: Decide, by_rows: Decision
    ) -> Decision | None:
        """Return what a step does with a plain loss, where that is better."""
        room = window.memory.headroom_bytes - _COPIES * self._most
        growth, recomputed = by_rows.growth_bytes, self._recomputed(by_rows)
        has_room = growth is not None and growth <= room and not recomputed
        has_room = has_room and self._n_untold < _MOST_UNTOLD
        if not has_room and facts.context not in self._learner.model.patterns:
            return None
        before = window.planned, window.n_expected, window.decision, window.reason
        self._use(window, is_by_rows=False)
        self.is_probing = True
        try:
            plain = decide(facts)
        except InfeasibleBudgetError:
            pass  # by rows there is a way
        else:
            is_better = self._recomputed(plain) <= recomputed + _ROWS_COST
            if plain.phase != "plan":
                self._n_untold += has_room
                is_better = has_room
            if is_better:
                self.has_probed = True
                return plain
        finally:
            self.is_probing = False
        self._use(window, is_by_rows=True)
        window.planned, window.n_expected, window.decision, window.reason = before
        return None

    def _use(self, window: Window, *, is_by_rows: bool) -> None:
        """Count with a loss that goes by rows, or with a plain one."""
        self._goes_by_rows = is_by_rows

    def apply(self, step: Step, *, is_again: bool = False) -> None:
        """Have the losses of a step go as was decided.

        Args:
            step: It.
            is_again: Whether its forward runs again: by rows then.
        """
        if is_again and self._may_choose:
            self._goes_by_rows = True
        for loss in self.losses:
            loss.is_on, loss.went_by_rows = self._goes_by_rows, False
            loss.logit_bytes = 0
        step.loss_can_be_safer = self._may_choose and not self._goes_by_rows

    def note(self, step: Step) -> None:
        """Take note of the logits of a step's forward, and of how its loss went.

        Args:
            step: It; its facts are those of the loss that it had.
        """
        if not self.losses:
            return
        found = max(loss.logit_bytes for loss in self.losses)
        if found:
            self._logit_bytes.setdefault(step.facts.sizes, found)
            if len(self._logit_bytes) > _MOST_SHAPES:
                del self._logit_bytes[next(iter(self._logit_bytes))]
        before, window = step.facts, step.window
        by_rows = self._describer.by_rows(before)
        went = any(loss.went_by_rows for loss in self.losses)
        if went and before != by_rows:
            step.facts = by_rows
            if window.planned == before:
                window.planned = by_rows
        elif not went and before != by_rows:
            self._goes_by_rows = False

    def _look(self, sizes: Sizes) -> None:
        """Bound the logits of a shape by those of the smallest seen that is as large.

        Of a shape larger than all they may be any, but for what sizes let expect.
        """
        own, known = self._logit_bytes.get(sizes), self._logit_bytes.items()
        expected = self._most = math.inf
        if own is not None:
            expected = self._most = own
        elif known:
            larger = (n for seen, n in known if _holds(seen, sizes))
            expected = self._most = min(larger, default=math.inf)
        if math.isinf(expected) and known:
            largest, most = max(known, key=operator.itemgetter(1))
            expected = most * max(1.0, math.prod(sizes) / max(1, math.prod(largest)))
        self._is_small = expected < _LARGE_LOGITS * self._budget_bytes

    def _recomputed(self, decision: Decision) -> float:
        """Return the share of the layers that are not kept."""
        if decision.chosen is None:
            return 1.0
        actions, keep = decision.chosen.plan.actions, self._learner.model.menu.first
        return sum(action != keep for action in actions) / max(1, len(actions))


def _holds(sizes: Sizes, other: Sizes) -> bool:
    """Whether one shape is at least as large as another in all sizes."""
    return len(sizes) == len(other) and all(map(operator.ge, sizes, other))
