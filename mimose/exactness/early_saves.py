"""Operators that save a tensor first and fill it afterwards.

Note: [Where a recomputation may end]
A recomputation ends as the last tensor that is needed is saved, in the midst of an
operator. Most save what they are given and what they have made, so nothing is missing.
But one that saves an auxiliary tensor, and then has its kernel fill it, leaves it as
the allocator gave it: RReLU does so with its noise. So the first recomputation runs to
its end, and what is saved without a graph is compared: as it is saved, and at the end.
A layer in which it differs runs to its end from then on. Since memory that was freed
may hold the very values of the forward, torch's own such operators are known by name
besides. A call that saves another number of tensors went another way, and is looked at
in the same way; so is one that has found another flag among the attributes.

Note: [What the rest would set back]
A forward may change something of the layer for a while: a mode, what learns, a module,
a buffer, a hook, a flag of torch's, an object. If the last tensor is saved meanwhile,
the recomputation must not end there. So all of it is looked at as well, as the last one
is saved and at the end. Numbers and texts among the attributes are put back after each
recomputation (see `mimose.exactness.guard`).
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.exactness.attributes import own_attributes
from mimose.exactness.global_flags import flags_now
from mimose.exactness.late_answers import LateAnswers
from mimose.tensors import is_plain, operators_of, sum_of_words, version
from mimose.torch_private import (
    StopRecomputation,
    pop_saved_hooks,
    push_saved_hooks,
    storage_key,
    top_saved_hooks,
    without_dispatch_modes,
)

_FILL_LATER = "RreluWithNoiseBackward"
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NOT_ENTERED = (nn.Module, type, types.ModuleType, types.FunctionType)
_DEPTH = 3
"""Of what is looked at: a table, what is in it, and what is in that."""
_MOST_ITEMS = 200
"""Of a container or an object whose content is looked at; of others its length."""


class Way(NamedTuple):
    """The way that a call has gone through its layer, as far as that is told apart."""

    n_saved: int
    """How many tensors it has saved."""
    variant: int
    """Of the flags among the attributes."""


class EarlySaves(contextlib.AbstractContextManager["EarlySaves"]):
    """Compares what is saved meanwhile, and the layer, with what they are at the end.

    Args:
        module: The layer, whose operators may save and change its own tensors.
        way: The way that its call went.

    Somebody who would end the recomputation, now that all that is needed is saved, has
    it ended when this is left.

    Attributes:
        way: That way.
    """

    def __init__(self, module: nn.Module, way: Way) -> None:
        self.way = way
        self._modules = list(module.modules())
        own = (*module.parameters(), *module.buffers())
        self._own = {_key(tensor) for tensor in own}
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._n_left = way.n_saved
        self._state: Any = None
        """Of the layer, as the last one was saved."""
        self._is_over = False

    def __enter__(self) -> EarlySaves:
        outer = top_saved_hooks(False)
        pack, unpack = outer or (_aside, _same)

        def noted(tensor: torch.Tensor) -> Any:
            if self._is_over:
                return _aside(tensor)
            self.note(tensor)
            try:
                return pack(tensor)
            except StopRecomputation:
                self._is_over = True
                return _aside(tensor)

        push_saved_hooks(noted, unpack)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pop_saved_hooks()
        if self._is_over and kind is None:
            raise StopRecomputation

    def note(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that is saved now."""
        self._n_left -= 1
        if not self._n_left:
            self._state = _state_of(self._modules)
        if tensor.requires_grad or not is_plain(tensor) or _key(tensor) in self._own:
            return
        with without_dispatch_modes():  # nobody is to count this
            kept = tensor.detach()
            self._seen.append((kept, _sum(kept)))

    @property
    def leaves_other(self) -> bool:
        """Whether the layer is another now than as the last tensor was saved."""
        try:
            return self._state is not None and _state_of(self._modules) != self._state
        except Exception:  # whatever comparing a user's values raises
            return True

    def differences(self) -> list[torch.Tensor]:
        """Return a flag a device, true where a tensor on it was filled later.

        What was saved is not held any longer.
        """
        seen, self._seen = self._seen, []
        found: dict[torch.device, list[torch.Tensor]] = {}
        with without_dispatch_modes():
            for tensor, before in seen:
                flag = torch.as_tensor(_sum(tensor) != before)
                found.setdefault(flag.device, []).append(flag)
            return [torch.stack(flags).any() for flags in found.values()]


class Branches:
    """Of which calls of a layer the recomputation may end early, by their way.

    Args:
        module: The layer.
        answers: Tells what only an accelerator knows.
    """

    def __init__(self, module: nn.Module, answers: LateAnswers) -> None:
        self._module = module
        self._answers = answers
        self._known: set[Way] = set()
        self._runs_on = False
        """Whether recomputations run to their end."""

    def forget(self) -> None:
        """Look at all calls anew."""
        self._known.clear()

    def is_known(self, way: Way) -> bool:
        """Whether a call that went this way was looked at."""
        return way in self._known

    def may_end_early(self, way: Way) -> bool:
        """Whether a recomputation may, of a call that went this way."""
        return way in self._known and not self._runs_on

    def note(self, output: object, began: int) -> None:
        """Look at the operators that a call has run.

        Args:
            output: What it returned.
            began: What `next_sequence_number` told as it began.
        """
        names = operators_of(output, began)
        if any(name.startswith(_FILL_LATER) for name in names):
            self._runs_on = True

    def early_saves(self, way: Way) -> EarlySaves:
        """Return what compares what a recomputation saves that runs to its end.

        Args:
            way: The way that its call went.
        """
        return EarlySaves(self._module, way)

    def check(self, saves: EarlySaves) -> None:
        """Take note of such a recomputation.

        Args:
            saves: What it has saved.
        """
        self._runs_on = self._runs_on or saves.leaves_other

        def tell(differ: Sequence[bool]) -> None:
            self._known.add(saves.way)
            self._runs_on = self._runs_on or any(differ)

        self._answers.ask(saves.differences(), tell)


class Count(contextlib.AbstractContextManager["Count"]):
    """Counts what is saved meanwhile.

    Attributes:
        n_saved: How many tensors.
    """

    def __init__(self) -> None:
        self.n_saved = 0

    def __enter__(self) -> Count:
        outer = top_saved_hooks(False)
        pack, unpack = outer or (_aside, _same)

        def counted(tensor: torch.Tensor) -> Any:
            self.n_saved += 1
            return pack(tensor)

        push_saved_hooks(counted, unpack)
        return self

    def __exit__(self, *_: object) -> None:
        pop_saved_hooks()


def _state_of(modules: Iterable[nn.Module]) -> Any:
    """Return what modules have now, and what is set of torch.

    Whoever compares it with a later one must hold what there was: what is replaced
    shows by its identity. It takes some microseconds a module.

    Args:
        modules: The modules.
    """
    tables = [_state_in(vars(module), _DEPTH) for module in modules]
    return tables, flags_now()


def _state_in(value: Any, depth: int) -> Any:
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version(value), value.requires_grad
    own = value if isinstance(value, _CONTAINERS) else own_attributes(value)
    if own is None or isinstance(value, _NOT_ENTERED):
        return id(value)
    if not depth or len(own) > _MOST_ITEMS:
        return id(value), len(own)
    if isinstance(own, dict):
        return id(value), [
            (name, _state_in(item, depth - 1)) for name, item in own.items()
        ]
    return id(value), [_state_in(item, depth - 1) for item in own]


def _sum(tensor: torch.Tensor) -> Any:
    total = sum_of_words(tensor)
    return int(total) if total.is_cpu else total


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if is_plain(tensor) else id(tensor)


_aside = torch.Tensor.detach
"""For a tensor that an operator edits and saves: it has the operator in its history.
Saved as it is the graph would hold itself, for good."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
