"""Computes the loss of a transformers' model by rows, if the budget needs it.

By rows a loss takes a third of the memory, but computes each log-softmax twice: 6% of a
step of Llama-1B. So it goes by rows only if the logits, in float32, are larger than a
share of the budget, and the step does not fit with a plain loss and nothing recomputed
(`mimose.policy.Policy.prefers_plain_loss`). The size of the logits is known before the
forward, because each label has one row.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimose.loss_by_rows import LEAST_BYTES, late

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

    Attributes:
        is_on: Whether the next loss goes by rows.
        n_classes: The number of logits for each label.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._given = vars(module).get(_OWN)
        config = getattr(module, "config", None)
        config = getattr(config, "get_text_config", lambda: config)()
        self.n_classes = getattr(config, "vocab_size", None) or 0
        self.is_on = False
        setattr(module, _OWN, self)

    @property
    def can_go_by_rows(self) -> bool:
        """Whether the model's loss is now a function of transformers."""
        is_in_place = vars(self._module).get(_OWN) is self
        return is_in_place and _is_theirs(self._original())

    def remove(self) -> None:
        """Restore the model's loss function, unless the user has set another."""
        self.is_on, state = False, vars(self._module)
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
        is_on = self.is_on and not torch.compiler.is_compiling()
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


def losses_of(model: nn.Module) -> Iterator[LossByRows]:
    """Yield the losses that a model computes with a function of transformers."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        takes = inspect.signature(module.forward).parameters
        if "labels" in takes and _is_theirs(getattr(module, "loss_function", None)):
            yield LossByRows(module)


def n_labels_of(kwargs: Mapping[str, Any]) -> int:
    """Return the number of labels in a step.

    Args:
        kwargs: The keyword arguments of the model's call.
    """
    labels = kwargs.get("labels")
    return labels.numel() if isinstance(labels, torch.Tensor) else 0


def large_logits(losses: Sequence[LossByRows], n_labels: int, budget_bytes: int) -> int:
    """Return the bytes of a step's logits in float32; 0 if they are small.

    Args:
        losses: The model's losses.
        n_labels: The number of labels in the step.
        budget_bytes: The budget; 0 if the step must take as little as possible.
    """
    least = max(LEAST_BYTES, _LARGE * budget_bytes)
    found = [(4 * n_labels * loss.n_classes, loss) for loss in losses]
    large = (n for n, loss in found if n >= least and loss.can_go_by_rows)
    return max(large, default=0)
