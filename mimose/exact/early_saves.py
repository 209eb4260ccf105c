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
in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mimose.exact.late_answers import LateAnswers
from mimose.tensors import is_plain, operators_of, sum_of_words
from mimose.torch_private import (
    StopRecomputation,
    pop_saved_hooks,
    push_saved_hooks,
    storage_key,
    top_saved_hooks,
    without_dispatch_modes,
)

_FILL_LATER = "RreluWithNoiseBackward"


class EarlySaves(contextlib.AbstractContextManager["EarlySaves"]):
    """Compares what is saved meanwhile with what it is at the end.

    Args:
        own: The layer's own tensors, which its operators may save and change.

    Somebody who would end the recomputation, now that all that is needed is saved, has
    it ended when this is left.

    Attributes:
        n_saved: How many tensors were saved.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {_key(tensor) for tensor in own}
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.n_saved = 0
        self._is_over = False

    def __enter__(self) -> EarlySaves:
        outer = top_saved_hooks(False)
        pack, unpack = outer or (_same, _same)

        def noted(tensor: torch.Tensor) -> Any:
            if self._is_over:
                return tensor
            self.n_saved += 1
            self.note(tensor)
            try:
                return pack(tensor)
            except StopRecomputation:
                self._is_over = True
                return tensor

        push_saved_hooks(noted, unpack)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pop_saved_hooks()
        if self._is_over and kind is None:
            raise StopRecomputation

    def note(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that is saved now."""
        if tensor.requires_grad or not is_plain(tensor) or _key(tensor) in self._own:
            return
        with without_dispatch_modes():  # nobody is to count this
            kept = tensor.detach()
            self._seen.append((kept, _sum(kept)))

    def differences(self) -> list[torch.Tensor]:
        """Return a flag, true where a tensor was filled later; [] where none can be.

        What was saved is not held any longer.
        """
        seen, self._seen = self._seen, []
        with without_dispatch_modes():
            found = [torch.as_tensor(_sum(t) != before) for t, before in seen]
            return [torch.stack(found).any()] if found else []


class Branches:
    """Of which calls of a layer the recomputation may end early.

    They are told apart by how many tensors they save.

    Args:
        module: The layer.
        answers: Tells what only an accelerator knows.
    """

    def __init__(self, module: nn.Module, answers: LateAnswers) -> None:
        self._module = module
        self._answers = answers
        self._known: set[int] = set()
        self._fills_later = False

    def forget(self) -> None:
        """Look at all calls anew."""
        self._known.clear()

    def is_known(self, n_saved: int) -> bool:
        """Whether a call that saves so much was looked at."""
        return n_saved in self._known

    def may_end_early(self, n_saved: int) -> bool:
        """Whether a recomputation may, of a call that saved so much."""
        return n_saved in self._known and not self._fills_later

    def note(self, output: object, began: int) -> None:
        """Look at the operators that a call has run.

        Args:
            output: What it returned.
            began: What `next_sequence_number` told as it began.
        """
        names = operators_of(output, began)
        if any(name.startswith(_FILL_LATER) for name in names):
            self._fills_later = True

    def early_saves(self) -> EarlySaves:
        """Return what compares what a recomputation saves that runs to its end."""
        module = self._module
        return EarlySaves(itertools.chain(module.parameters(), module.buffers()))

    def check(self, saves: EarlySaves, n_saved: int) -> None:
        """Take note of such a recomputation.

        Args:
            saves: What it has saved.
            n_saved: How many tensors its call had.
        """

        def tell(differ: Sequence[bool]) -> None:
            self._known.add(n_saved)
            self._fills_later = self._fills_later or any(differ)

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
        pack, unpack = outer or (_same, _same)

        def counted(tensor: torch.Tensor) -> Any:
            self.n_saved += 1
            return pack(tensor)

        push_saved_hooks(counted, unpack)
        return self

    def __exit__(self, *_: object) -> None:
        pop_saved_hooks()


def _sum(tensor: torch.Tensor) -> Any:
    total = sum_of_words(tensor)
    return int(total) if total.is_cpu else total


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if is_plain(tensor) else id(tensor)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
