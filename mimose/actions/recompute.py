"""Runs a call's forward again in the backward, instead of holding what it saves.

Note: [Regions]
Hooks on saved tensors replace each by a holder, as in `torch.utils.checkpoint`. When a
backward needs the first of them, the forward runs again up to the last needed tensor,
and each holder that still lives gets its tensor. Another backward runs it once more.

A recomputation that runs out of memory drops what it has rebuilt, and runs once more.

Note: [Whose containers]
The call gets the caller's own lists and dicts, so the caller sees what a layer adds.
Each recomputation gets new copies of them as they were before. A first call that
receives other objects, such as a key-value cache, is kept, which shows whether it
changes them. A layer that does is kept from then on.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.actions.base import Invocation, Probe
from mimose.actions.host import AwayInput
from mimose.actions.keep import Keep
from mimose.exactness.call_inputs import PLAIN, CallInputs, is_opaque
from mimose.exactness.comparison import Comparison
from mimose.exactness.context import Context, accelerators
from mimose.exactness.guard import Found
from mimose.exactness.layer import CONTAINED, Layer
from mimose.exactness.side_effects import FirstCall
from mimose.exactness.slots import SavedTensors
from mimose.exceptions import MimoseError, first_line
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.model.compiled import SCRIPTED, code_in_graph
from mimose.model.patch import hidden
from mimose.planners.actions import RECOMPUTE
from mimose.torch_private import (
    NO_GRAPH_TASK,
    StopRecomputation,
    current_graph_task,
    drop_saved_hooks,
    eval_frame_callback,
    is_from_checkpoint,
    is_in_own_function,
    next_sequence_number,
    push_saved_hooks,
    pytree,
    top_saved_hooks,
    version_of,
)
from mimose.types import OnRecompute

_TENSORS = frozenset((torch.Tensor, nn.Parameter))
_INFERENCE = "one of its input tensors was made under torch.inference_mode()"
_EDITS_INPUT = "it edits its own input in place"
_INPUT_EDITED = "its input was edited in place before its backward"
_OTHER_TENSORS = "recomputing it gave other tensors"

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
_KIND: Callable[[torch.Tensor], _Kind] = operator.attrgetter("shape", "dtype", "device")


class Recompute:
    """Holds a call's inputs and outputs, and recomputes what is between."""

    spec = RECOMPUTE

    def why_not(self, layer: Layer) -> str | None:
        """Return why a call cannot be recomputed, if that is known before it runs."""
        del layer
        hooks = top_saved_hooks(False)
        if hooks is not None and is_from_checkpoint(hooks[0]):
            return "the model itself checkpoints it"
        return None

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward; a first call shows what it changes."""
        layer = call.layer
        found = layer.enter()
        inputs = Inputs(call.args, call.kwargs)
        why = found.state.trouble or (_INFERENCE if inputs.has_inference else "")
        if why:
            layer.keep(why)
        is_new = inputs.given.has_objects and not layer.is_known
        if layer.has_new_hooks:
            layer.note_new_hooks()
            is_new = True
        # If ranks wait for each other, one must not keep what others recompute.
        if why or (is_new and not layer.waits):
            if probe is not None:
                probe.trace.calls[probe.index].action = Keep.spec.name
            return Keep().run(call, probe)
        away = self._send_away(call, probe)
        if away is not None:
            inputs = Inputs(call.args, call.kwargs, away)
        first = None if layer.is_known else FirstCall(layer.module)
        on_recompute, comparison = call.on_recompute, None
        if probe is not None:
            on_recompute = probe.trace.recomputed(probe.index, probe.gauge)
            if probe.around is not None:
                on_recompute = probe.around(on_recompute, call, probe)
        if not layer.is_compared:
            comparison = Comparison(layer)
            on_recompute = comparison.compared(on_recompute)
        region = Region(
            layer,
            inputs,
            found,
            on_recompute,
            is_whole=call.is_whole or probe is not None or comparison is not None,
            saved=SavedTensors(layer.slots) if first is None else first.saved,
        )
        output = region.run(call)
        why = ""
        if first is None:
            layer.raise_if_changed_late(found)
        else:
            is_contained = any("." in name for _, name in found.edited())
            why = layer.learn(first) or (CONTAINED if is_contained else "")
            region.found = layer.with_versions(found.state)
        if comparison is not None:
            comparison.take(output)
            why = why or _code_in(layer, output, region.began)
            if inputs.are_edited:
                why = _EDITS_INPUT
        layer.findings.read.append((layer.index, inputs.given))
        if why:  # at once, so that the next forward knows even if this one fails
            layer.keep(why)
            layer.findings.impure[layer.index] = why
        return output

    def _send_away(self, call: Invocation, probe: Probe | None) -> AwayInput | None:
        """Return an input that is held elsewhere; None if all inputs stay."""
        del call, probe
        return None


def _code_in(layer: Layer, output: Any, began: int) -> str:
    """Search a call's graph for compiled code; return why to keep scripted code."""
    if layer.is_compiled:
        return ""
    is_compiled, is_scripted = code_in_graph(output, began)
    if is_compiled:
        layer.note_compiled()
    return SCRIPTED if is_scripted else ""


class Inputs:
    """The inputs of a call, held for its recomputation without their graph.

    Args:
        args: Its arguments.
        kwargs: Its keyword arguments.
        away: An input that is held elsewhere; None for none.

    Attributes:
        tensors: All tensors among them.
        has_inference: Whether one is an inference tensor, which counts no edits.
        given: The caller's tensors, which are not held, and objects.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        away: AwayInput | None = None,
    ) -> None:
        self._away = away
        self.has_inference = False
        self.given = CallInputs()
        self.tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._seen: dict[int, Any] = {}
        self._spec: Any = None
        if away is None and all(map(_is_plain, (*args, *kwargs.values()))):
            self._args = [self._again(value) for value in args]
            self._kwargs = {name: self._again(v) for name, v in kwargs.items()}
        else:
            leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
            self._args = [self._leaf(leaf) for leaf in leaves]
            self._kwargs = {}
        self._seen.clear()
        self.given.holder = weakref.ref(self)

    def clear(self) -> None:
        """Free everything, because the call is abandoned.

        An input that was edited in place with a result of the call belongs to the graph
        that holds this: a cycle that would never be freed.
        """
        self._args, self._kwargs, self._spec = [], {}, None
        self.tensors.clear()
        self._versions.clear()

    @property
    def are_edited(self) -> bool:
        """Whether a tensor was edited in place, or an object changed."""
        is_edited = list(map(version_of, self.tensors)) != self._versions
        return is_edited or self.given.are_objects_changed()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The accelerators that the tensors are on."""
        away = () if self._away is None else (self._away.stand_in,)
        return accelerators((*self.tensors, *away))

    def again(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments for a recomputation, with inputs from elsewhere."""
        if self._spec is None:
            return self._args, self._kwargs
        leaves = self._args
        if self._away is not None:
            found = self._away.bring()
            leaves = [found if leaf is self._away else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def _again(self, value: Any) -> Any:
        """Return an argument for the recomputation; tensors without their graph."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return tuple([self._again(item) for item in value])
        return value

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        if is_opaque(leaf):
            self.given.add(leaf)
        return leaf

    def _tensor(self, value: torch.Tensor) -> Any:
        found = self._seen.get(id(value))
        if found is not None:
            return found
        self.given.add(value)
        if value.is_inference():
            self.has_inference = True
            return value
        if self._away is not None and self._away.is_of(value):
            self._seen[id(value)] = self._away
            return self._away
        again = value if value.is_leaf else value.detach().requires_grad_()
        self._seen[id(value)] = again
        self.tensors.append(again)
        self._versions.append(version_of(value))
        return again


def _is_plain(value: Any) -> bool:
    """Whether an argument is a plain tensor, a number, or a tuple of these."""
    kind = type(value)
    if kind is tuple:
        return all(map(_is_plain, value))
    return kind in _TENSORS or kind in PLAIN


class _Holder(dict[Any, torch.Tensor]):
    """Stands for a saved tensor; holds its recomputed value by backward."""

    __slots__ = ("__weakref__", "kind")

    kind: _Kind


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Unpack what a recomputation saves in its own graph."""
    return tensor


@dataclass(eq=False)
class Region:
    """One call of a layer, recomputed when a backward needs what it saved.

    See Note: [Regions].
    """

    layer: Layer
    inputs: Inputs
    found: Found
    """The state that the call found, and a recomputation must find."""
    on_recompute: OnRecompute | None
    """Called in the backward with the input tensors and a function that recomputes. It
    must call this function and return its result."""
    is_whole: bool
    """Whether a recomputation runs to its end."""
    saved: SavedTensors
    """Tensors that the forward changes; each recomputation gets copies."""
    has_run: bool = False

    def __post_init__(self) -> None:
        self._holders: list[weakref.ref[_Holder]] = []
        devices = tuple(dict.fromkeys((*self.layer.devices, *self.inputs.devices)))
        self._context = Context(devices)
        self.began = next_sequence_number()

    def run(self, call: Invocation) -> Any:
        """Run the forward on the caller's own arguments."""
        outer = top_saved_hooks(False)
        try:
            push_saved_hooks(self._pack, self._unpack)
            output = call.forward()
        finally:
            drop_saved_hooks(outer)
        self.has_run = True
        self.layer.note_way(len(self._holders), output, self.began)
        return output

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder()
        holder.kind = _KIND(tensor)
        self._holders.append(weakref.ref(holder))
        return holder

    def _unpack(self, holder: _Holder) -> torch.Tensor:
        task: Any = current_graph_task()
        if task not in holder:
            if eval_frame_callback() is None:
                self.recompute(holder, task)
            else:
                _untraced()(self, holder, task)
        # To read the running node takes as long as the rest of this.
        is_own = self.layer.has_own_functions and is_in_own_function()
        if is_own and task != NO_GRAPH_TASK:
            return holder[task]  # it may be read twice
        return holder.pop(task)

    def recompute(self, wanted: _Holder, task: int) -> None:
        """Run the forward again, and fill the holders with what it saves.

        Args:
            wanted: The holder whose tensor is needed.
            task: The backward's number. Outside a backward, only this holder is filled.

        Raises:
            ChangedWeightsError: A weight was edited since the forward.
            RecomputationError: An argument was, or the forward saved other tensors.
        """
        if self.inputs.are_edited:
            self.layer.fail(_INPUT_EDITED)
        only = wanted if task == NO_GRAPH_TASK else None
        try:
            is_same = self._recompute_as_found(task, only)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            is_same = None
        if is_same is None:  # behind the except: its traceback holds tensors
            for reference in self._holders:
                holder = reference()
                if holder is not None:
                    holder.pop(task, None)
            self.layer.findings.on_out_of_memory()
            is_same = self._recompute_as_found(task, only)
        if not is_same or task not in wanted:
            self.layer.fail(_OTHER_TENSORS)

    def _recompute_as_found(self, task: int, only: _Holder | None) -> bool:
        """Recompute in the state that the call found; return as `_recompute`."""
        with (
            _GENERATORS,
            self.layer.restored(self.found, has_run=self.has_run),
            self._context.as_then(),
        ):
            return self._recompute(task, only)

    def _recompute(self, task: int, only: _Holder | None) -> bool:
        """Recompute; return whether the saved tensors are of the same kinds."""
        left = self._holders[::-1]
        is_same = True
        # If a layer takes a gradient in its forward, it has not saved everything yet.
        runs_on = self.is_whole or self.layer.runs_to_end or self.layer.is_compiled
        ends_early = not (self.has_run and runs_on)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal is_same
            if not left:
                if ends_early:  # the layer caught the first StopRecomputation
                    raise StopRecomputation
                is_same = False
                # An operator may edit what it saves. Then its history contains the
                # operator, and the graph would hold itself in a cycle.
                return tensor.detach()
            if tensor.requires_grad:
                tensor = tensor.detach()
            holder = left.pop()()
            if holder is not None:
                is_same = is_same and _KIND(tensor) == holder.kind
                if only is None or holder is only:
                    holder[task] = tensor
            if ends_early and not left:
                raise StopRecomputation
            return tensor

        outer = top_saved_hooks(False)
        try:
            push_saved_hooks(pack, unchanged)
            if self.on_recompute is None:
                self._forward()
            else:
                self.on_recompute(self._forward, self.inputs.tensors)
        except StopRecomputation:
            pass
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (MimoseError, OSError)):
                raise  # an error of the device or the system, not of the layer
            why = f"its second run raised {type(error).__name__}: {first_line(error)}"
            self.layer.fail(why, error)
        finally:
            drop_saved_hooks(outer)
        return is_same and not left

    def _forward(self) -> Any:
        """Run the forward in the state in which the call began."""
        self._context.draw_again()
        self.saved.swap_in_copies()
        args, kwargs = self.inputs.again()
        with torch.enable_grad():
            return self.layer.forward(*args, **kwargs)


_GENERATORS = threading.RLock()
"""All threads share torch's generators, so only one backward at a time may restore its
forward's state and draw."""


@functools.cache
def _untraced() -> Callable[[Region, _Holder, int], None]:
    """Return `Region.recompute`, hidden from a compiler that traces the backward."""
    return hidden(Region.recompute)
