"""What training runs and nobody plans: layers that are never called, or came later."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mimose.exactness.unit import Unit
from mimose.inputs.compiled import is_compiled

_log = logging.getLogger(__name__)

_PATIENCE = 5
"""Training steps; a layer that none of them calls is worth a word."""
_MOST_NAMES = 3


class Overlooked:
    """Says once that layers are never called, and once that others came after attach.

    Args:
        units: The layers.
        model: The model.
    """

    def __init__(self, units: Sequence[Unit], model: nn.Module) -> None:
        self._units = units
        self._left = list(units)
        self._n_steps = 0
        self._running: dict[nn.Module, None] = {}
        """Modules inside such layers that were called all the same."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._known = weakref.WeakSet(model.modules())
        self._has_told_of_new = False

    @property
    def never_called(self) -> tuple[str, ...]:
        """The layers that no step has called; none before there were a few steps."""
        left = self._left if self._n_steps >= _PATIENCE else ()
        return tuple(unit.name for unit in left)

    # ------------------------------------------------------------------ never called

    def begin(self) -> None:
        """Take note that a forward begins; in one of them see what runs inside."""
        if self._n_steps != _PATIENCE - 1:
            return
        for unit in self._left:
            for module in unit.module.modules():
                if module is unit.module or isinstance(module, torch.jit.ScriptModule):
                    continue
                if not is_compiled(module):  # it would be compiled anew
                    hook = module.register_forward_pre_hook(self._note_running)
                    self._hooks.append(hook)

    def end(self) -> None:
        """Take note that it has come to an end, or failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_running(self, module: nn.Module, _: Any) -> None:
        self._running[module] = None

    def note_calls(self) -> None:
        """Take note of what a forward has called that came to its end."""
        if not self._left:
            return
        self._n_steps += 1
        self._left = [unit for unit in self._left if not unit.calls]
        if self._left and self._n_steps == _PATIENCE:
            self._tell()
        if self._n_steps >= _PATIENCE:
            self._running.clear()

    def _tell(self) -> None:
        names = [unit.name for unit in self._left]
        inside = _outermost(self._running)
        classes = sorted({type(m).__name__ for m in inside if _has_weights(m)})
        if classes:
            advice = (
                f"modules inside them are called ({_some(classes)}) and not planned. "
                f"Pass attach(layers=...) the classes of those, or of what holds them"
            )
        else:
            advice = (
                "they are not planned. If others run in their stead, pass "
                "attach(layers=...) the classes of those"
            )
        _log.warning(
            "mimose: %d of %d layers were never called in %d training steps: %s; %s",
            len(names),
            len(self._units),
            _PATIENCE,
            _some(names),
            advice,
        )

    # ------------------------------------------------------------------ put in later

    def note_modules(self, model: nn.Module) -> None:
        """Take note that the model consists of other modules.

        Args:
            model: The model.
        """
        named = dict(model.named_modules())
        new = {m: name for name, m in named.items() if m not in self._known}
        self._known.update(new)
        if self._has_told_of_new:
            return
        planned = {inner for unit in self._units for inner in unit.module.modules()}
        kinds = {type(unit.module) for unit in self._units}
        places = {unit.name for unit in self._units}
        layers = [
            name
            for module, name in new.items()
            if planned.isdisjoint(module.modules())  # else it is put around one
            and (type(module) in kinds or name in places)
            and _has_weights(module)
        ]
        if layers:
            self._has_told_of_new = True
            _log.warning(
                "mimose: layers were put in after attach (%s), and are not planned: "
                "detach, and attach again",
                _some(layers),
            )


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    found = list(modules)
    inside = {inner for m in found for inner in m.modules() if inner is not m}
    return [module for module in found if module not in inside]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _some(names: Sequence[str]) -> str:
    """List a few names, and say how many more there are."""
    hidden = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {hidden} more" if hidden > 0 else shown
