"""What holds a step's highest level, by the history of the simulated allocator.

Each block that is held then is named by its storage, or by when it was taken: in the
layers' forwards, behind the last of them, or since the last boundary.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from mimose.model.layers import find_layers
from mimose.model.sharding import groups_in, inside_ddp, own_parameters
from mimose.sim import use
from mimose.sim.memory import MemoryEvent
from mimose.tensors import local, tensors_in
from mimose.torch_private import fsdp_buffers


class _Mark(NamedTuple):
    """A boundary within the step."""

    at: int
    """How often memory was taken or freed before it."""
    kind: str
    """``layer``, ``exit``, ``backward`` or ``end``."""
    owners: Mapping[int, str]
    """What is at an address."""


class _Block(NamedTuple):
    address: int
    n_bytes: int
    born: int
    """The number of its event, ..."""
    freed: int = -1
    """... and of the one that frees it."""


def at_peak(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, float],
    step: Callable[[], object],
) -> dict[str, float]:
    """Run a step, and return the bytes of what held its highest level.

    They add up to what the allocator had reserved at that moment. Nothing is returned
    if the step fails.

    Args:
        model: The model that the step trains.
        optimizer: Its optimizer, whose own step comes behind the moment.
        held: The bytes that are held before the step, by what they are.
        step: Runs it.
    """
    sim = use()
    stats = sim.memory_stats()
    level = stats["requested_bytes.all.current"]
    reserved = stats["reserved_bytes.all.current"]
    sim.record_memory_history()
    try:
        with _marked(model, optimizer) as marks:
            step()
        history = sim.memory_history()
    finally:
        sim.record_memory_history(False)
    if not marks or marks[-1].kind != "end":
        return {}
    peak, gaps, at = level, reserved - level, 0
    events = list[MemoryEvent]()
    for event in history:
        if len(events) == marks[-1].at:
            break
        if event.kind not in _TAKES:
            reserved += _RESERVES.get(event.kind, 0) * event.n_bytes
            continue
        events.append(event)
        level += _TAKES[event.kind] * event.n_bytes
        if level > peak:
            peak, gaps, at = level, reserved - level, len(events)
    found, taken = dict(held), 0
    for block in _blocks(events, at):
        name = _name(block, marks, at)
        found[name] = found.get(name, 0.0) + block.n_bytes
        taken += block.n_bytes
    found["other"] = peak - taken - sum(held.values())
    found["fragmentation"] = gaps
    return {name: float(n_bytes) for name, n_bytes in found.items() if n_bytes > 0}


_TAKES: Mapping[str, int] = {"alloc": 1, "free": -1}
_RESERVES: Mapping[str, int] = {
    "segment_alloc": 1,
    "segment_map": 1,
    "segment_free": -1,
    "segment_unmap": -1,
}


@contextlib.contextmanager
def _marked(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[list[_Mark]]:
    """Note within the block where layers begin and end, and who owns what there."""
    marks: list[_Mark] = []
    groups = [group for _, group in groups_in(model)]
    before = _n_events()

    def mark(kind: str) -> None:
        owners = dict[int, str]()
        for whole, reduced in map(fsdp_buffers, groups):
            owners |= dict.fromkeys(_addresses(whole), "gathered weights")
            owners |= dict.fromkeys(_addresses(reduced), "gradients to be reduced")
        if kind == "end":
            grads = [p.grad for p in own_parameters(model) if p.grad is not None]
            owners |= dict.fromkeys(_addresses(map(local, grads)), "gradients")
        marks.append(_Mark(_n_events() - before, kind, owners))

    def left(_: nn.Module, __: object, output: object) -> None:
        mark("exit")
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: mark("backward"))  # type: ignore[no-untyped-call]

    handles = [optimizer.register_step_pre_hook(lambda *_: mark("end"))]
    for _, layer in find_layers(inside_ddp(model)):
        handles.append(layer.register_forward_pre_hook(lambda *_: mark("layer")))
        handles.append(layer.register_forward_hook(left))
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    for storage in (each.untyped_storage() for each in tensors):
        if storage.nbytes():
            yield storage.data_ptr()


def _n_events() -> int:
    stats = use().memory_stats()
    return int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])


def _blocks(events: Sequence[MemoryEvent], at: int) -> Iterable[_Block]:
    """Return the blocks that were taken before a moment and are held then."""
    live: dict[int, _Block] = {}
    for number, event in enumerate(events[:at]):
        if event.kind == "alloc":
            live[event.address] = _Block(event.address, event.n_bytes, number)
        else:
            live.pop(event.address, None)
    freed = dict[int, int]()
    for number, event in enumerate(events[at:], at):
        if event.kind == "free":
            freed.setdefault(event.address, number)
    for block in live.values():
        yield block._replace(freed=freed.get(block.address, len(events)))


def _name(block: _Block, marks: Sequence[_Mark], at: int) -> str:
    """Return what a block is that is held at the number of an event."""
    for mark in marks:
        if block.born < mark.at <= block.freed and block.address in mark.owners:
            return mark.owners[block.address]
    own = bisect_right(marks, block.born, key=lambda mark: mark.at)
    before = [mark.kind for mark in marks[:own]]
    if "backward" in before:
        return "working memory"
    if before[-1:] == ["exit"] and marks[own].kind == "backward":
        return "logits and loss"
    is_new = own == bisect_right(marks, at - 1, key=lambda mark: mark.at)
    return "working memory" if is_new else "activations"
