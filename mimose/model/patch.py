"""Replaces forwards of a model, and restores them."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.exceptions import AlreadyAttachedError
from mimose.model.compiled import called_attribute
from mimose.torch_private import COMPILED_CALL, set_graphs_by_use

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
        owner: The session, on the patches by which it is found.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
        owner: Any = None,
    ) -> None:
        self._module = module
        self._run = run
        self._attribute = called_attribute(module)
        self._previous = module.__dict__.get(self._attribute)
        self.original: Callable[..., Any] = getattr(module, self._attribute)
        self.owner = owner
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


class Patches:
    """All that a session has replaced, until `remove` or the end of the model.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._patches: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(model, _run_all, self._undo)

    def add(self, patch: Any) -> None:
        """Add what has a method ``remove``; the last one is removed first."""
        self._patches.append(patch)

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Call a function after all are removed, or as the model is collected."""
        self._undo.append(undo)

    def use_one_graph(self) -> None:
        """Have compiled code choose its graph alike: [Regional compilation]."""
        set_graphs_by_use(False)
        self.undo_by(functools.partial(set_graphs_by_use, True))

    def remove(self) -> None:
        """Restore everything. A second call does nothing."""
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()
        self._finalizer.detach()  # it would keep the meter's files open
        _run_all(self._undo)


def _run_all(undo: list[Callable[[], None]]) -> None:
    """Run each, the last first. One that is interrupted runs again in the next call."""
    while undo:
        undo[-1]()
        undo.pop()


def _find_attached(model: nn.Module) -> tuple[str, nn.Module, Patch] | None:
    """Return the first module that a session plans, with its name and its patch."""
    for name, module in model.named_modules():
        for place in ("forward", COMPILED_CALL):
            patch = module.__dict__.get(place)
            if isinstance(patch, Patch) and not patch.is_removed:
                return name, module, patch
    return None


def owner_of(model: nn.Module) -> Any:
    """Return the session that plans the model, or a part of it; None if none does."""
    found = _find_attached(model)
    return None if found is None else found[2].owner


def raise_if_attached(model: nn.Module) -> None:
    """Check that no session plans the model, or a part of it, already.

    Raises:
        AlreadyAttachedError: One does.
    """
    found = _find_attached(model)
    if found is not None:
        name, module, _ = found
        msg = (
            f"{name or 'the model'} ({type(module).__name__}) is already planned by a "
            f"session: call mimose.detach(model) before you attach again, or go on "
            f"with that session, mimose.session_of(model)"
        )
        raise AlreadyAttachedError(msg)
