"""The loss function of a model of transformers, given logits that are cast late.

Such a model asks itself for the function that computes its loss, and can be given
another (`loss_function`). What computes it stays its own: it is handed logits in which
cross-entropy goes by rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mimose.head.cross_entropy import LEAST_BYTES
from mimose.head.late_upcast import LateUpcast, late

_OWN = "_loss_function"
"""Where a model keeps the function that it was given, in place of that of its class."""
_STATE = "__getstate__"
"""The attribute that Python's ``copy`` and ``pickle`` ask an object for its own."""
_THEIRS = "transformers."


class LossByRows:
    """A model's loss function, replaced on the instance until `remove`.

    Copies and pickles of the model are made without it, and have the original.

    Args:
        module: The model.

    Attributes:
        is_on: Whether the next loss goes by rows; never after `remove`, in whatever was
            made of the model's attributes meanwhile.
        went_by_rows: Whether one has, since whoever sets `is_on` looked last.
        logit_bytes: Of the largest logits since then, were they in float32.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._previous: Callable[..., Any] | None = vars(module).get(_OWN)
        self.is_on = self.went_by_rows = False
        self.logit_bytes = 0
        functools.update_wrapper(self, self.original, updated=())
        setattr(module, _OWN, self)
        vars(module)[_STATE] = self._state_of_module

    @property
    def original(self) -> Callable[..., Any]:
        """What was given to the instance; else what the class chooses, as of now."""
        if self._previous is not None:
            return self._previous
        without: Any = object.__new__(type(self._module))
        vars(without).update(_without(vars(self._module), None))
        function: Callable[..., Any] = without.loss_function
        return function

    @property
    def is_in_place(self) -> bool:
        """Whether nobody has given the model another since."""
        return vars(self._module).get(_OWN) is self

    @property
    def can_go_by_rows(self) -> bool:
        """Whether the model's loss could go by rows as of now."""
        return self.is_in_place and _is_theirs(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss."""
        original = self.original
        if torch.compiler.is_compiling() or not _is_theirs(original):
            return original(*args, **kwargs)
        sizes = map(_n_logits, (*args, *kwargs.values()))
        self.logit_bytes = max(self.logit_bytes, 4 * max(sizes, default=0))
        if not self.is_on:
            return original(*args, **kwargs)
        args = tuple(map(_late, args))
        kwargs = {name: _late(value) for name, value in kwargs.items()}
        given = (*args, *kwargs.values())
        self.went_by_rows |= any(isinstance(each, LateUpcast) for each in given)
        return original(*args, **kwargs)

    def remove(self) -> None:
        """Put the original back, unless somebody has given the model another."""
        self.is_on = False
        vars(self._module).pop(_STATE, None)
        if not self.is_in_place:
            return
        if self._previous is None:
            delattr(self._module, _OWN)
        else:
            setattr(self._module, _OWN, self._previous)

    def _state_of_module(self) -> Any:
        """Return what copies and pickles of the module are made from."""
        module = self._module
        of_class: Any = getattr(type(module), _STATE, None)  # Python 3.10 has none
        state = vars(module) if of_class is None else of_class(module)
        if not isinstance(state, Mapping):
            return state
        return _without(state, self._previous if self.is_in_place else state.get(_OWN))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give the original to copies that are made in another way."""
        del memo
        return self.original

    def __reduce__(self) -> Any:
        """Pickle as the original."""
        return _same, (self.original,)


def _without(state: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """Return a model's attributes with nothing of a `LossByRows` among them.

    Args:
        state: The attributes.
        given: The loss function that the model was given; None for that of its class.
    """
    rest = {name: v for name, v in state.items() if name not in (_OWN, _STATE)}
    return rest if given is None else {**rest, _OWN: given}


def _same(value: Any) -> Any:
    return value


def _n_logits(value: Any) -> int:
    is_tensor = type(value) is torch.Tensor and value.is_floating_point()
    return value.numel() if is_tensor else 0


def _late(value: Any) -> Any:
    is_large = _n_logits(value) and value.nbytes >= LEAST_BYTES
    return late(value) if is_large else value


def modules_with_loss(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute their loss by a function of transformers'."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        takes = inspect.signature(module.forward).parameters
        if "labels" in takes and _is_theirs(getattr(module, "loss_function", None)):
            yield module


def _is_theirs(function: Any) -> bool:
    name = getattr(function, "__module__", None) or ""
    return callable(function) and name.startswith(_THEIRS)
