"""Hooks on modules inside a layer: run once, although the layer runs twice.

Note: [Hooks that watch]
A forward hook that counts calls or collects activations would do so again in each
recomputation. One that returns something, saves a tensor for the backward, edits a
tensor or a container in place, sets an attribute of the layer or draws random numbers
is part of what the layer computes, and has to run again. Which it is can be seen only
while it runs, and may be another in the next call: so what each did is noted in the
forward, and a recomputation leaves out those that have only watched. It finds the
others as the forward did, whoever took them off since. A hook that hands something to
the layer in another way, through ``.data`` or a global, is not seen.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from mimose.exactness.early_saves import Count
from mimose.exactness.random_state import RandomState, accelerators
from mimose.exactness.structure import Tables, filled_as
from mimose.tensors import tensors_in, version
from mimose.torch_private import (
    forward_hooks_of,
    global_forward_hooks,
    pytree,
)

Hook: TypeAlias = Callable[..., Any]


class InnerHooks:
    """The tables of the hooks on some modules' forwards, and of those of all modules.

    Those of a layer itself are called outside of what is recomputed.

    Args:
        modules: The layer, and those inside; none to follow no hooks.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes = [vars(module) for module in modules]
        self._pairs = list(global_forward_hooks) if modules else []
        for module in modules[1:]:
            self._pairs += forward_hooks_of(module)
        self._tables = [hooks for hooks, _ in self._pairs]

    def call(self) -> HookCalls | None:
        """Return what follows the hooks of one call; None where there are none."""
        if not any(self._tables):
            return None
        return HookCalls(self._pairs, self._attributes)

    def any(self) -> bool:
        """Whether there are hooks now."""
        return any(self._tables)

    def as_in(self, call: HookCalls | None) -> contextlib.AbstractContextManager[None]:
        """Return what leaves in place the hooks that a call has to repeat.

        Args:
            call: What followed its hooks; None where there were none.
        """
        nothing: Tables = [(table, {}) for table in self._tables if table]
        return filled_as([*nothing, *([] if call is None else call.repeated())])


class HookCalls:
    """What the hooks inside a layer do in one call: Note: [Hooks that watch].

    Args:
        pairs: Tables of hooks, each with that of those which are given keywords.
        attributes: Those of each module that their hooks may set.
    """

    __slots__ = ("_attributes", "_flags", "_found", "_needed")

    def __init__(
        self, pairs: Iterable[tuple[Any, Any]], attributes: Sequence[dict[str, Any]]
    ) -> None:
        self._attributes = attributes
        used = [(hooks, flags) for hooks, flags in pairs if hooks]
        self._found: Tables = [(hooks, dict(hooks)) for hooks, _ in used]
        self._flags: Tables = [(flags, dict(flags)) for _, flags in used]
        self._needed: set[int] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take note of what hooks do in the forward, and of those that have to do it.

        The others are not held: what they collect may lead back to this call.
        """
        needed, count = self._needed, Count()

        def noted(hook: Hook) -> Hook:
            def run(module: nn.Module, *args: Any) -> Any:
                tensors = list(tensors_in(args))
                leaves = pytree.tree_leaves(args)
                random = RandomState(accelerators(tensors))
                before = count.n_saved, list(map(version, tensors))
                attributes = list(map(dict, self._attributes))
                returned = hook(module, *args)
                is_same = (
                    returned is None
                    and before == (count.n_saved, list(map(version, tensors)))
                    and _are_same(leaves, pytree.tree_leaves(args))
                    and all(map(_has, self._attributes, attributes))
                    and random.is_now()
                )
                if not is_same:
                    needed.add(id(hook))
                return returned

            return run

        wrappers = [
            (table, {key: noted(hook) for key, hook in hooks.items()})
            for table, hooks in self._found
        ]
        for table, content in wrappers:
            table.update(content)
        try:
            with count:
                yield
        finally:
            for (table, content), (_, hooks) in zip(wrappers, self._found, strict=True):
                for key, wrapper in content.items():
                    if table.get(key) is wrapper:  # it may have been taken off
                        table[key] = hooks[key]
            self._found = self._repeated()

    def repeated(self) -> Tables:
        """Return the hooks that have to run again, as known by now, by table."""
        return [*self._repeated(), *self._flags]

    def _repeated(self) -> Tables:
        return [
            (table, {k: hook for k, hook in hooks.items() if id(hook) in self._needed})
            for table, hooks in self._found
        ]


def _has(table: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(table) == len(before) and all(
        table.get(name) is value for name, value in before.items()
    )


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
