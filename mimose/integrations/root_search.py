"""Finding the module whose forward is a step, by watching which is called.

Note: [The root]
A step is one forward of a module, the root. Lightning calls `training_step`, which may
call the LightningModule itself, or a model in it, or two, and nobody can tell which
before it does: so the callback does not guess. When training starts it looks for the
layers, and watches the forwards of all modules that hold some. The first of them that
is called in training mode, with grad enabled, is the root: the outermost one, for a
module is called before those inside it. The session attaches in that call, and so even
the first step is within the budget. Where a layer runs and no module that holds it was
called, there is no root, and an error says so before anything was held.

`training_step` itself is not taken for the root: it logs, appends to lists, and in
manual optimization runs backwards and optimizers, so it must not be run again when a
forward fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.inputs.layers import Named, find_units
from mimose.inputs.patch import Patch
from mimose.near_names import near_names

_log = logging.getLogger(__name__)


class RootSearch:
    """Waits for the first forward of a module that holds units: see the note above.

    Args:
        whole: The LightningModule.
        name: The only module in it that may be the root; None for any that is called.
        units: As the user gave them.
        unwritten: The forwards of modules that have none of their own.
        found: Is called with the root, and the units to attach with.
    """

    def __init__(
        self,
        whole: nn.Module,
        name: str | None,
        units: Any,
        unwritten: Collection[Any],
        found: Callable[[nn.Module, Any], None],
    ) -> None:
        self._name = name
        self._spec = units
        self._found = found
        top = whole if name is None else _module_named(whole, name)
        self._units = find_units(top, units)
        self._learning = _learning(self._units)
        holders = _holders(top, self._learning) if name is None else {name: top}
        self._holders = {n: m for n, m in holders.items() if _is_written(m, unwritten)}
        self._n_running = 0
        self._scouts: list[Patch] = [
            *(_HolderScout(module, self) for module in self._holders.values()),
            *(_UnitScout(named, self) for named in self._learning),
        ]

    @property
    def first_unit(self) -> str:
        """The name of the first layer."""
        return self._learning[0][0]

    def stop(self) -> None:
        """Give all modules back as they were."""
        for scout in reversed(self._scouts):
            scout.remove()
        self._scouts.clear()

    def is_root(self, module: nn.Module) -> bool:
        """Return whether a holder that is called now is the root."""
        return self._n_running == 0 and _is_training(module)

    def choose(self, root: nn.Module) -> None:
        """End the search with this root."""
        self.stop()
        inside = {id(module) for module in root.modules()}
        self._say_outside([n for n, m in self._learning if id(m) not in inside])
        if self._spec is None or self._name is not None:
            self._found(root, self._spec)
            return
        chosen = {id(module) for _, module in self._units}
        self._found(root, lambda module: id(module) in chosen)

    def _say_outside(self, names: list[str]) -> None:
        if names:
            _log.warning(
                "mimose: the module that training_step called first holds only some "
                "of the layers, and %d (%s, ...) are not planned. For all of them let "
                "training_step call the LightningModule itself: self(batch). For one "
                "module alone name it: MimoseCallback(module=...)",
                len(names),
                names[0],
            )

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Run a holder that is not the root: evaluation, or a model kept fixed."""
        self._n_running += 1
        try:
            yield
        finally:
            self._n_running -= 1

    def refuse_alone(self, name: str, unit: nn.Module) -> None:
        """Make sure that a unit runs in the forward of a module that holds it.

        Args:
            name: The unit's.
            unit: It is about to run.

        Raises:
            MimoseError: In training, it runs in none.
        """
        if self._n_running or not _is_training(unit):
            return
        if self._name is not None:
            msg = (
                f"MimoseCallback(module={self._name!r}): training_step runs its layer "
                f"{name!r}, but does not call that module. Name one whose forward is "
                f"called in training_step, or leave module out"
            )
        else:
            named = ", ".join(repr(n) if n else "self" for n in self._holders)
            msg = (
                f"training_step runs the layer {name!r} without calling a module that "
                f"holds it, so nothing tells where a step begins. Call one of these "
                f"in training_step: {named or 'none has a forward'}; or move the loop "
                f"over the layers into forward(), and call self(batch)"
            )
        raise MimoseError(msg)


class _HolderScout(Patch):
    """The forward of a module that may be the root.

    Args:
        module: The module.
        search: Is told.
    """

    def __init__(self, module: nn.Module, search: RootSearch) -> None:
        super().__init__(module)
        self._search = search

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Become the root's first step, or pass through."""
        if self.is_removed:
            return self.original(*args, **kwargs)
        if self._search.is_root(self._module):
            self._search.choose(self._module)
            return self._module.forward(*args, **kwargs)
        with self._search.inside():
            return self.original(*args, **kwargs)


class _UnitScout(Patch):
    """The forward of a unit, until a root is found.

    Args:
        named: The unit, and its name.
        search: Is told.
    """

    def __init__(self, named: Named, search: RootSearch) -> None:
        super().__init__(named[1])
        self._name = named[0]
        self._search = search

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, if a module that holds the unit does."""
        if not self.is_removed:
            self._search.refuse_alone(self._name, self._module)
        return self.original(*args, **kwargs)


def _module_named(whole: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(whole.named_modules())
    if name not in modules:
        near = near_names(name, modules)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        msg = f"module: no module named {name!r} in {type(whole).__name__}{hint}"
        raise MimoseError(msg)
    return modules[name]


def _learning(units: tuple[Named, ...]) -> tuple[Named, ...]:
    """Leave out units that are frozen, as a teacher's are, unless all are."""
    learning = [
        named for named in units if any(p.requires_grad for p in named[1].parameters())
    ]
    return tuple(learning) or units


def _holders(top: nn.Module, units: tuple[Named, ...]) -> dict[str, nn.Module]:
    """Return all modules that units are in, by name, outermost first."""
    wanted = {id(module) for _, module in units}
    return {
        name: module
        for name, module in top.named_modules()
        if id(module) not in wanted
        and any(id(inner) in wanted for inner in module.modules())
    }


def _is_written(module: nn.Module, unwritten: Collection[Any]) -> bool:
    """Return whether a module has a forward of its own, if only on the instance."""
    return "forward" in vars(module) or type(module).forward not in unwritten


def _is_training(module: nn.Module) -> bool:
    return bool(module.training and torch.is_grad_enabled())
