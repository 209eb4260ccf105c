"""Errors of a recomputation that name the layer, and say what to do.

Note: [Hooks inside hooks]
`checkpoint` compares what was saved in a hook that autograd calls, outside of anything
that is passed to it. The hooks pushed inside its own see every tensor it would see,
hand it on, and pass an error on with the layer's name. They also hand out again what an
own Function asks for twice (`ctx.saved_tensors` read anew), which `checkpoint` refuses.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils.checkpoint import CheckpointError

from mimose.exceptions import RecomputationError
from mimose.torch_private import (
    NO_GRAPH_TASK,
    current_graph_task,
    is_from_checkpoint,
    is_in_own_function,
    pop_saved_hooks,
    push_saved_hooks,
    top_saved_hooks,
)

_EDITED = "modified by an inplace operation"
_INPUT_EDITED = "its input was edited in place before its backward"
_NESTED = 2
"""So many backwards may have a tensor at hand that is read again."""
_OTHER_TENSORS = "recomputing it gave other tensors"


class Naming(contextlib.AbstractContextManager[None]):
    """While entered, inside a checkpointed region, its errors will name the layer.

    Args:
        name: The layer's.
        on_error: Called, with what happened, before the error is raised.
    """

    __slots__ = ("_name", "_on_error")

    def __init__(self, name: str, on_error: Callable[[str], None]) -> None:
        self._name = name
        self._on_error = on_error

    def __enter__(self) -> None:
        hooks = top_saved_hooks(False)
        assert hooks is not None  # those of the region itself
        pack, unpack = hooks

        given: weakref.WeakKeyDictionary[Any, dict[int, Any]] = (
            weakref.WeakKeyDictionary()
        )

        def named(holder: Any) -> Any:
            task = current_graph_task()
            before = given.get(holder, {})
            if task in before:
                return before[task]
            try:
                tensor = unpack(holder)
            except RecomputationError:
                raise
            except RuntimeError as error:
                why = _why(error)
                if not why:
                    raise
                self.refuse(why, error)
            if task != NO_GRAPH_TASK and is_in_own_function():
                # That of a backward, and of one inside of it.
                given[holder] = dict([*before.items(), (task, tensor)][-_NESTED:])
            return tensor

        push_saved_hooks(pack, named)

    def __exit__(self, *_: object) -> None:
        pop_saved_hooks()

    def refuse_edited(self) -> NoReturn:
        """Raise the error of a recomputation whose input was edited since.

        Raises:
            RecomputationError: Always.
        """
        self.refuse(_INPUT_EDITED)

    def refuse_other_tensors(self) -> NoReturn:
        """Raise the error of a recomputation that saved other tensors.

        Raises:
            RecomputationError: Always.
        """
        self.refuse(_OTHER_TENSORS)

    def refuse(self, why: str, error: BaseException | None = None) -> NoReturn:
        """Raise the error that names the layer.

        Args:
            why: What happened.
            error: What it follows from.

        Raises:
            RecomputationError: Always.
        """
        self._on_error(why)
        msg = (
            f"{self._name} cannot be recomputed: {why}. It is kept from the next step "
            f"on; this step's gradients are not complete: zero them and go on, or run "
            f"steps by session.step(closure), which repeats such a step"
        )
        raise RecomputationError(msg) from error


def _why(error: RuntimeError) -> str:
    """Say what an error of `checkpoint` means; nothing for any other."""
    if isinstance(error, CheckpointError):
        return _OTHER_TENSORS
    if _EDITED in str(error):
        return _INPUT_EDITED
    return ""


def is_inside_checkpoint() -> bool:
    """Whether somebody's `checkpoint` is recording what is saved just now."""
    hooks = top_saved_hooks(False)
    return hooks is not None and is_from_checkpoint(hooks[0])
