"""The loss function of a model of transformers, given logits that are cast late.

Such a model asks itself for the function that computes its loss, and can be given
another (`loss_function`). What computes it stays its own: it is handed logits in which
cross-entropy goes by rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mimose.head.cross_entropy import LEAST_BYTES
from mimose.head.late_upcast import late

_OWN = "_loss_function"
"""Where a model keeps the function that it was given, in place of that of its class."""
_THEIRS = "transformers."


class LeanLoss:
    """A model's loss function, replaced on the instance until `remove`.

    A deep copy or a pickle of the model gets the original.

    Args:
        module: The model.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._previous = vars(module).get(_OWN)
        self.original: Callable[..., Any] = module.loss_function
        functools.update_wrapper(self, self.original, updated=())
        setattr(module, _OWN, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        args = tuple(map(_late, args))
        return self.original(*args, **{name: _late(v) for name, v in kwargs.items()})

    def remove(self) -> None:
        """Put the original back, unless somebody has given the model another."""
        if vars(self._module).get(_OWN) is not self:
            return
        if self._previous is None:
            delattr(self._module, _OWN)
        else:
            setattr(self._module, _OWN, self._previous)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model the original."""
        del memo
        return self.original

    def __reduce__(self) -> Any:
        """Pickle as the original."""
        return _same, (self.original,)


def _same(value: Any) -> Any:
    return value


def _late(value: Any) -> Any:
    is_large = type(value) is torch.Tensor and value.nbytes >= LEAST_BYTES
    return late(value) if is_large and value.is_floating_point() else value


def modules_with_loss(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute their loss by a function of transformers'."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        takes = inspect.signature(module.forward).parameters
        if "labels" in takes and _is_theirs(getattr(module, "loss_function", None)):
            yield module


def has_lean_loss(model: nn.Module) -> bool:
    """Whether a session computes a model's loss by rows."""
    return any(isinstance(vars(m).get(_OWN), LeanLoss) for m in model.modules())


def _is_theirs(function: Any) -> bool:
    name = getattr(function, "__module__", None) or ""
    return callable(function) and name.startswith(_THEIRS)
