"""A module's forward, replaced for a while."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.inputs.compiled import called_attribute

is_traced = torch.compiler.is_dynamo_compiling
"""Whether a compiler follows this very code."""


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose frames, and those it calls, no compiler follows.

    Args:
        function: What runs.
    """
    disable: Any = torch.compiler.disable
    found: Callable[..., Any] = disable(function)
    return found


class Patch:
    """A module's ``forward``, replaced on the instance until `remove`.

    Of a module that was compiled in place, it is the compiled call that is replaced.

    Names, ``state_dict`` keys, hooks and the class stay as they are. A deep copy or a
    pickle of the module gets its class's plain ``forward`` back: a copy is not planned.

    Args:
        module: The module.
        run: Called in its place with the original, and with a call's arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self._module = module
        self._run = run
        self._attribute = called_attribute(module)
        self._previous = module.__dict__.get(self._attribute)
        self.original: Callable[..., Any] = getattr(module, self._attribute)
        self.is_removed = False
        functools.update_wrapper(self, self.original, updated=())
        setattr(module, self._attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what takes the original's place, or the original where it is back."""
        if self.is_removed:
            return self.original(*args, **kwargs)
        return self._run(self.original, args, kwargs)

    def remove(self) -> None:
        """Put the original back; where other code patched over this, pass through."""
        self.is_removed = True
        if self._module.__dict__.get(self._attribute) is not self:
            return
        if self._previous is None:
            delattr(self._module, self._attribute)
        else:
            setattr(self._module, self._attribute, self._previous)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give the copied module its plain ``forward``."""
        if self._previous is not None:
            return copy.deepcopy(self._previous, memo)
        copied = memo.get(id(self._module), self._module)
        return types.MethodType(type(self._module).forward, copied)

    def __reduce__(self) -> Any:
        """Pickle as the plain bound method: the class's, for no state is set yet."""
        return getattr, (self._module, "forward")
