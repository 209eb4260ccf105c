"""What a session changes of the model and the process, and how it is undone."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from torch import nn

from mimose.exceptions import AlreadyAttachedError
from mimose.inputs.compiled import OneGraph
from mimose.inputs.kv_cache import WithoutCache, caching_modules, tell_of_cache
from mimose.inputs.patch import Patch
from mimose.runtime.engine import Engine
from mimose.runtime.loss_choice import LossByRows, modules_with_loss
from mimose.runtime.root import RootPatch
from mimose.runtime.unit_patch import UnitPatch
from mimose.torch_private import COMPILED_CALL


class Attachment:
    """The forwards, hooks and settings that are taken over, until `remove`.

    Args:
        model: The model.
        engine: What the forwards are to run in.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._patches: list[Patch | LossByRows] = []
        self._undo = contextlib.ExitStack()
        self._finalizer: Any = None
        try:
            self._install(model, engine)
        except BaseException:
            self.remove()
            raise

    def _install(self, model: nn.Module, engine: Engine) -> None:
        self._undo.callback(engine.footprint.drop_wall)
        engine.optimizers.start()
        self._undo.callback(engine.optimizers.remove)
        if any(unit.is_compiled for unit in engine.units):
            self._undo.enter_context(OneGraph())
        engine.events.on_compiled = lambda: self._undo.enter_context(OneGraph())
        self._finalizer = weakref.finalize(model, self._undo.close)
        caching = caching_modules(model)
        if caching:
            tell_of_cache(caching)
        for unit in engine.units:
            self._patches.append(UnitPatch(unit, engine.events))
        self._patches.append(RootPatch(model, engine.driver))
        self._patches.extend(WithoutCache(module) for module in caching)
        if engine.driver.plans:
            losses = list(map(LossByRows, modules_with_loss(model)))
            self._patches.extend(losses)
            engine.driver.loss.losses = losses

    def remove(self) -> None:
        """Give everything back as it was. Harmless twice."""
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()
        self._undo.close()
        if self._finalizer is not None:
            self._finalizer.detach()  # it would keep the meter's files open


def refuse_second(model: nn.Module) -> None:
    """Make sure that no session plans the model, or a part of it, already.

    Raises:
        AlreadyAttachedError: One does.
    """
    for name, module in model.named_modules():
        places = [module.__dict__.get(name) for name in ("forward", COMPILED_CALL)]
        if any(isinstance(p, Patch) and not p.is_removed for p in places):
            msg = (
                f"{name or 'the model'} ({type(module).__name__}) is already planned "
                f"by a session: call its detach() before attaching again"
            )
            raise AlreadyAttachedError(msg)
