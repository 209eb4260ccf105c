"""Computes the loss of a transformers' model by rows, if the budget needs it.

By rows a loss takes a third of the memory, but computes each log-softmax twice: 6% of a
step of Llama-1B. So it goes by rows only if the logits, in float32, are larger than a
share of the budget, and the step does not fit with a plain loss and nothing recomputed
(`mimose.policy.plans.Plans.prefers_plain_loss`). The size of the logits is known before
the forward, because each label has one row.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mimose.cost.problem import Memory
from mimose.loss_by_rows import LEAST_BYTES, late
from mimose.policy.plans import Plans
from mimose.types import BY_ROWS, StepInput

_LARGE = 1 / 32
"""Share of the budget. Smaller logits do not change a plan."""

_OWN = "_loss_function"
"""Attribute of a transformers' model for a loss function that the user has set."""


class LossByRows:
    """Replaces the loss function of a transformers' model, until `remove`.

    The model reads its loss function from the property `loss_function`, which can be
    set. This object calls the original function, with logits for which cross-entropy
    goes by rows, in the forward and in recomputations. Copies and pickles of the model
    have the original function.

    Args:
        module: The model.
        is_on: Returns whether the next loss goes by rows.

    Attributes:
        n_classes: The number of logits for each label.
    """

    def __init__(self, module: Any, is_on: Callable[[], bool]) -> None:
        self._module = module
        self._given = vars(module).get(_OWN)
        config = getattr(module, "config", None)
        config = getattr(config, "get_text_config", lambda: config)()
        self.n_classes = getattr(config, "vocab_size", None) or 0
        self._is_on: Callable[[], bool] = is_on
        setattr(module, _OWN, self)

    @property
    def can_go_by_rows(self) -> bool:
        """Whether the model's loss is now a function of transformers."""
        is_in_place = vars(self._module).get(_OWN) is self
        return is_in_place and _is_theirs(self._original())

    def remove(self) -> None:
        """Restore the model's loss function, unless the user has set another."""
        self._is_on, state = bool, vars(self._module)
        if state.get(_OWN) is self:
            del state[_OWN]
            if self._given is not None:
                state[_OWN] = self._given

    def _original(self) -> Any:
        """Return the function that the user has set, or the one of the class."""
        if self._given is not None:
            return self._given
        without: Any = object.__new__(type(self._module))
        state = vars(self._module).items()
        vars(without).update((name, value) for name, value in state if name != _OWN)
        return without.loss_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        original = self._original()
        is_on = not torch.compiler.is_compiling() and self._is_on()
        if is_on and _is_theirs(original):
            args = tuple(map(_by_rows, args))
            kwargs = {name: _by_rows(value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copy and pickle as the original function."""
        return operator.itemgetter(0), ((self._original(),),)


def _by_rows(value: Any) -> Any:
    is_logits = type(value) is torch.Tensor and value.is_floating_point()
    return late(value) if is_logits and value.nbytes >= LEAST_BYTES else value


def _is_theirs(function: Any) -> bool:
    name = getattr(function, "__module__", None) or ""
    return callable(function) and name.startswith("transformers.")


def _with_losses(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose loss is a function of transformers."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        takes = inspect.signature(module.forward).parameters
        if "labels" in takes and _is_theirs(getattr(module, "loss_function", None)):
            yield module


def n_labels_of(kwargs: Mapping[str, Any]) -> int:
    """Return the number of labels in a step.

    Args:
        kwargs: The keyword arguments of the model's call.
    """
    labels = kwargs.get("labels")
    return labels.numel() if isinstance(labels, torch.Tensor) else 0


class LossChoice:
    """Chooses whether a step's losses go by rows.

    Args:
        plans: Knows which steps fit with a plain loss.

    Attributes:
        losses: The model's losses that can go by rows; none in a baseline.
        is_by_rows: Whether those of the running step do.
    """

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self.losses: tuple[LossByRows, ...] = ()
        self.is_by_rows = False

    def replace_in(self, model: nn.Module) -> tuple[LossByRows, ...]:
        """Replace the model's loss functions, and return what removes that."""
        found = list(_with_losses(model))
        self.losses = tuple(LossByRows(each, lambda: self.is_by_rows) for each in found)
        return self.losses

    def forget_losses(self) -> None:
        """Free the losses, and so the model, as the session ends."""
        self.losses = ()

    def choose(
        self,
        step_input: StepInput,
        n_labels: int,
        memory: Memory,
        budget_bytes: int,
        *,
        may_be_plain: bool,
    ) -> StepInput:
        """Choose for a step that begins, and return its input.

        Args:
            step_input: The step with a plain loss.
            n_labels: The number of labels in the step.
            memory: What is held, and the budget.
            budget_bytes: The budget; 0 if the step must take as little as possible.
            may_be_plain: Whether a large loss may be a plain one.
        """
        contexts = self.contexts(
            step_input, n_labels, memory, budget_bytes, may_be_plain=may_be_plain
        )
        self.is_by_rows = contexts[0] != step_input.context
        return (
            step_input._replace(context=contexts[0]) if self.is_by_rows else step_input
        )

    def choose_least(self, n_labels: int) -> None:
        """Take as little memory as possible for a forward that runs again."""
        self.is_by_rows = self._large_logits(n_labels, 0) > 0

    def contexts(
        self,
        plain: StepInput,
        n_labels: int,
        memory: Memory,
        budget_bytes: int,
        *,
        may_be_plain: bool = True,
    ) -> list[str]:
        """Return the context of a step, and the other one that its loss allows.

        Args:
            plain: The step with a plain loss.
            n_labels: As for `choose`.
            memory: As for `choose`.
            budget_bytes: As for `choose`.
            may_be_plain: As for `choose`.
        """
        large = self._large_logits(n_labels, budget_bytes)
        if not large:
            return [plain.context]
        by_rows = plain._replace(context=plain.context + BY_ROWS)
        prefers = self._plans.prefers_plain_loss
        is_plain = may_be_plain and prefers(plain, by_rows, large, memory)
        own, other = (plain, by_rows) if is_plain else (by_rows, plain)
        return [own.context, other.context]

    def _large_logits(self, n_labels: int, budget_bytes: int) -> int:
        """Return the bytes of a step's logits in float32; 0 if they are small."""
        least = max(LEAST_BYTES, _LARGE * budget_bytes)
        found = [(4 * n_labels * loss.n_classes, loss) for loss in self.losses]
        large = (n for n, loss in found if n >= least and loss.can_go_by_rows)
        return max(large, default=0)
