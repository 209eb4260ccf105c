"""Replaces a module's forward."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.inputs.compiled import called_attribute

is_traced = torch.compiler.is_dynamo_compiling
"""Whether `torch.compile` traces the running code."""


hidden: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
"""Returns a function that `torch.compile` does not trace, nor what it calls."""


class Patch:
    """Replaces a module's ``forward`` on the instance, until `remove`.

    For a module that was compiled in place, it replaces the compiled call.

    Names, ``state_dict`` keys, hooks and the class stay unchanged. A deep copy or a
    pickle of the module has its class's ``forward``, so a copy is not planned.

    Args:
        module: The module.
        run: Called instead, with the original and a call's arguments.
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
        self.owner: Any = None
        """The session, on the patches by which it is found."""
        self.is_removed = False
        functools.update_wrapper(self, self.original, updated=())
        setattr(module, self._attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement; the original after `remove`."""
        if self.is_removed:
            return self.original(*args, **kwargs)
        return self._run(self.original, args, kwargs)

    def remove(self) -> None:
        """Restore the original; if other code has patched over this, pass calls on."""
        self.is_removed = True
        if self._module.__dict__.get(self._attribute) is not self:
            return
        if self._previous is None:
            delattr(self._module, self._attribute)
        else:
            setattr(self._module, self._attribute, self._previous)

    def __reduce__(self) -> Any:
        """Copy and pickle as what it has replaced, bound to the copied module."""
        if self._previous is not None:
            return operator.itemgetter(0), ((self._previous,),)
        return getattr, (self._module, "forward")
