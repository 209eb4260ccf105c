"""Measures one step: marks at the boundaries, and the samples that follow.

Note: [Boundaries]
A mark is set where the step begins, where a call is entered and left, at the end of the
model's forward, where the backward begins at a loss that the model returned, where the
*first* gradient reaches any output that a call made, where a recomputation begins and
ends, and at the end of the backward. Each mark reads the meter and starts a new peak.
Two marks give a segment's retained bytes and its transient peak over the level at its
start. Hooks on inputs would not help: they run in the order of registration, before the
previous call's output, and for an input that many calls share (T5's encoder output)
only after all of them. So a backward segment ends at the next boundary.

Note: [Held bytes from the recomputation]
What a call would hold if it were kept is what its recomputation holds right after the
layer's own forward has returned, because the same operators save the same tensors. So a
collecting step needs no extra run. It is read inside the region and without the early
stop, whose exception holds frames (3% too much in GPT-2, 20% in a ResNet).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from mimose.cost.prices import HALF, SINGLE, TF32
from mimose.exactness.side_effects import tensor_slots
from mimose.inputs.describe import autocast_keeps_copies
from mimose.memory.meters import Meter
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.model.patch import hidden
from mimose.planners import Menu
from mimose.planners.actions import KEEP, RECOMPUTE
from mimose.tensors import nodes_of, storages_in, tensors_in
from mimose.torch_private import (
    TorchDispatchMode,
    base_of,
    gradient_bytes,
    next_sequence_number,
    overload_packet,
    to_copy,
    top_saved_hooks,
)
from mimose.types import (
    CallSample,
    Measured,
    OnRecompute,
    SegmentSample,
    StepSample,
)

INNER_GRADIENT = "a gradient is taken inside the forward"
"""Then the segments are not those of an ordinary step."""
_ATTENTION = {
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}
_CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten._convolution}


# ------------------------------------------------------------------ one call, counted


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the FLOPs of attention. Torch's formula fails on grouped heads up to 2.11.

    Args:
        query: (..., heads, queries, width).
        key: (..., heads or groups of them, keys, width).
        value: (..., the same, keys, width of the output).
    """
    widths = query.shape[-1] + value.shape[-1]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * widths


def precision_of(dtype: torch.dtype, is_convolution: bool) -> str:
    """Return the precision of a product: see `mimose.cost.prices`.

    Args:
        dtype: Of its operands.
        is_convolution: Torch's flags allow TF32 to convolutions and to others apart.
    """
    if dtype.itemsize <= 2:
        return HALF
    backends: Any = torch.backends
    rules = backends.cudnn.conv if is_convolution else backends.cuda.matmul
    is_short = dtype == torch.float32 and rules.fp32_precision == "tf32"
    return TF32 if is_short else SINGLE


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages made by operators while it is active.

    A storage counts if an operator *made* it: not if the result is a view, a detached
    alias or an in-place result of an argument. It counts until it is freed. Memory that
    an operator allocates and frees inside itself is not counted, nor is what FSDP2
    gathers weights in: a thread of the process group frees it at any time.

    Attributes:
        live_bytes: Bytes alive now.
        peak_bytes: The highest total so far.
        flops: FLOPs of the products, convolutions and attention that ran, by the
            formulas of `torch.utils.flop_counter`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._by_precision: Counter[str] = Counter()
        # storage identity -> (weak reference, bytes)
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._copies: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count the storages that it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "fsdp":
            for key in storages_in((args, kwargs, result)):
                self._freed(key)
        elif isinstance(result, (torch.Tensor, list, tuple)):
            self._count(args, kwargs, result)
            if func is to_copy and _is_weight(args[0]):
                self._copies.update(storages_in(result))
        packet, flops = overload_packet(func), 0
        if packet in _ATTENTION:
            flops = attention_flops(*args[:3])
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        if flops:
            self.flops += flops
            precision = precision_of(args[0].dtype, packet in _CONVOLUTIONS)
            self._by_precision[precision] += flops
        return result

    def precision(self) -> str:
        """Return the precision of most FLOPs; "" without any."""
        most = self._by_precision.most_common(1)
        return most[0][0] if most else ""

    def copied_bytes(self) -> int:
        """Sum the live bytes of copies of weights in another precision."""
        return sum(self._made[key][1] for key in self._copies if key in self._made)

    def bytes_made(self, tree: object) -> int:
        """Sum the bytes of the tracked storages of `tree`'s tensors."""
        keys = storages_in(tree)
        return sum(self._made[key][1] for key in keys if key in self._made)

    def _count(self, args: Any, kwargs: Any, result: Any) -> None:
        made = storages_in(result)
        new = made.keys() - self._made.keys()
        if not new:
            return
        for key in new - storages_in((args, kwargs)).keys():
            n_bytes = made[key].nbytes()
            if n_bytes:
                self._add(key, made[key], n_bytes)

    def _add(self, key: int, storage: torch.UntypedStorage, n_bytes: int) -> None:
        self._made[key] = weakref.ref(storage, lambda _: self._freed(key)), n_bytes
        self.live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int) -> None:
        self._copies.discard(key)
        _, n_bytes = self._made.pop(key, (None, 0))
        self.live_bytes -= n_bytes


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether autocast would keep a copy of it; inputs may be leaves, too."""
    is_single = tensor.dtype == torch.float32
    return is_single and tensor.requires_grad and isinstance(tensor, nn.Parameter)


class Reading(NamedTuple):
    """The counts of one call."""

    held_bytes: dict[str, float]
    """By action: bytes that would be held from the call's end to its backward. A full
    count gives those of `keep` and `recompute`."""
    flops: int
    early_flops: int
    """The part that a recomputation with an early stop runs."""
    peak_bytes: int
    """The highest total of what it made, as far as that can be counted."""
    saved_bytes: int
    """Bytes that its operators have saved, without parameters."""
    largest_bytes: int
    """The largest tensor that it saves or that its backward makes; 0 if not looked."""
    copied_bytes: float = 0.0
    """Bytes of copies of weights that autocast keeps."""
    saved_output_bytes: float | None = None
    """Bytes of its outputs that its own operators have saved; None if not known."""
    precision: str = ""
    """Of most FLOPs: see `mimose.cost.prices`; "" if not counted."""


Gauge: TypeAlias = Callable[
    [Callable[[], Any], Sequence[torch.Tensor]], tuple[Any, Reading]
]
"""Runs a call on some input tensors; returns its output and its counts."""


def by_operators(
    forward: Callable[[], Any], given: Sequence[torch.Tensor]
) -> tuple[Any, Reading]:
    """Run a call and count the storages that its operators make: a `Gauge`."""
    del given
    tracker, saves, began = StorageTracker(), _Saves(), next_sequence_number()
    with tracker:
        if top_saved_hooks(False) is None:
            output, early_flops, own = forward(), tracker.flops, None
        else:
            with saves.noted(lambda: tracker.flops):
                output = forward()
            early_flops, own = saves.flops, saves.bytes_of(output)
        live = float(tracker.live_bytes)
        copied = float(tracker.copied_bytes()) if autocast_keeps_copies() else 0.0
    held = {KEEP.name: live, RECOMPUTE.name: float(tracker.bytes_made(output))}
    flops, peak = tracker.flops, tracker.peak_bytes
    saved, largest = saves.total_bytes(), saves.largest(output, began)
    precision = tracker.precision()
    return output, Reading(
        held, flops, early_flops, peak, saved, largest, copied, own, precision
    )


def by_saved(
    forward: Callable[[], Any],
    given: Sequence[torch.Tensor],
    root: nn.Module,
    flops: int,
) -> tuple[Any, Reading]:
    """Run compiled code, whose operators cannot be counted, and count what it saves.

    Args:
        forward: Runs it.
        given: The call's input tensors.
        root: The model, whose own tensors do not count.
        flops: The FLOPs of the layer's forward.
    """
    others = [slot.now() for slot in tensor_slots(root.modules())]
    known = storages_in([*root.parameters(), *others, *given])
    saves = _Saves()
    with saves.noted():
        output = forward()
    returned = _sizes_in(output)
    live = _total({**saves.sizes, **returned}, known)
    held = {KEEP.name: live, RECOMPUTE.name: _total(returned, known)}
    # What operators made shows the largest tensor: a walk of each graph takes long.
    return output, Reading(held, flops, flops, int(live), saves.total_bytes(), 0)


def by_example(
    forward: Callable[[], Any], given: Sequence[torch.Tensor], example: Reading
) -> tuple[Any, Reading]:
    """Run a recomputation, and count only what it saves.

    Args:
        forward: Runs it.
        given: The call's input tensors.
        example: The counts of a call of its family at its sizes.
    """
    del given
    saves = _Saves()
    with saves.noted():
        output = forward()
    n_bytes, own = saves.total_bytes(), example.saved_output_bytes
    if own is not None:
        own = saves.bytes_of(output)
    more = n_bytes - example.saved_bytes
    held = {**example.held_bytes, KEEP.name: example.held_bytes[KEEP.name] + more}
    return output, example._replace(
        held_bytes=held,
        peak_bytes=example.peak_bytes + more,
        saved_bytes=n_bytes,
        saved_output_bytes=own,
    )


class _Saves:
    """What a forward saves for its backward, but parameters.

    Attributes:
        sizes: The bytes of each storage, by identity.
        flops: The FLOPs before the last saved tensor.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.flops = 0

    @contextlib.contextmanager
    def noted(self, flops: Callable[[], int] = int) -> Iterator[None]:
        """Note each tensor that is saved for a backward.

        Other hooks on saved tensors, such as those of a recomputation, still run.

        Args:
            flops: Returns the FLOPs so far.
        """
        pack, unpack = top_saved_hooks(False) or (lambda t: t, lambda t: t)

        def noted(tensor: torch.Tensor) -> Any:
            self.flops = flops()
            base = base_of(tensor)
            if not isinstance(tensor if base is None else base, nn.Parameter):
                self.sizes.update(_sizes_in(tensor))
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(hidden(noted), unpack):
            yield

    def total_bytes(self) -> int:
        """Sum the bytes of all."""
        return sum(self.sizes.values())

    def largest(self, output: object, began: int) -> int:
        """Return the bytes of the largest, or of the largest gradient.

        Args:
            output: What the call returned.
            began: What `next_sequence_number` returned as it began.
        """
        gradients = map(gradient_bytes, nodes_of(output, began))
        return max([0, *gradients, *self.sizes.values()])

    def bytes_of(self, output: object) -> float:
        """Sum the bytes of those that hold an output."""
        returned = _sizes_in(output).items()
        return float(sum(n_bytes for key, n_bytes in returned if key in self.sizes))


def _sizes_in(tree: object) -> dict[int, int]:
    return {key: storage.nbytes() for key, storage in storages_in(tree).items()}


def _total(sizes: Mapping[int, int], known: Container[int]) -> float:
    return float(sum(n_bytes for key, n_bytes in sizes.items() if key not in known))


# ------------------------------------------------------------------ the marks


class Mark(NamedTuple):
    """A reading of the meter at a boundary."""

    kind: str
    call: int
    """Index of the call, or -1."""
    live_bytes: int
    """What is held."""
    peak_bytes: int
    """The highest level since the mark before."""
    keeps_copies: bool = False
    """Whether autocast keeps its copies of weights now."""


class Trace:
    """The marks and measurements of one step.

    Args:
        meter: The meter that marks read.
        budget_bytes: The budget.

    Attributes:
        is_closed: Whether it reads no more.
        spoilt: Why nothing can be learned from the readings; "" if something can.
    """

    def __init__(self, meter: Meter, budget_bytes: float = math.inf) -> None:
        self._meter = meter
        self._budget_bytes = budget_bytes
        self.marks: list[Mark] = []
        self.calls: list[Measured] = []
        self.peak_bytes = 0
        self.is_closed = False
        self.spoilt = ""
        self._is_forward = True
        self._is_in_call = False
        self._taken_bytes: int | None = None
        """Total of all allocations at the end of the model's forward."""
        self._least_peak_bytes = 0
        """A lower bound of the running segment's peak."""

    @property
    def room_bytes(self) -> float:
        """What the budget left at the last mark."""
        return self._budget_bytes - self.marks[-1].live_bytes

    def mark(self, kind: str, call: int = -1) -> None:
        """Read the meter at a boundary; the first mark only starts the peak."""
        if self.is_closed:
            return
        if kind == "root_exit":
            self._is_forward = False
            self._taken_bytes = self._meter.taken_bytes()
        live, peak = self._meter.read()
        self._meter.reset_peak()
        peak = max(peak, self._least_peak_bytes) if self.marks else live
        self._least_peak_bytes = 0
        self.peak_bytes = max(self.peak_bytes, peak)
        self.marks.append(Mark(kind, call, live, peak, autocast_keeps_copies()))

    def turn(self) -> None:
        """Mark the begin of the backward, if nothing was made since the forward's end.

        Otherwise the mark would hide the memory of metrics computed in between.
        """
        taken = self._meter.taken_bytes()
        if taken is None or self._taken_bytes is None:
            return
        if taken - self._taken_bytes <= 2**14:  # numbers: a scaled loss, its gradient
            self.mark("backward")

    def end(self) -> None:
        """Mark the end of the backward, and stop reading."""
        self.mark("end")
        self.is_closed = True

    def stop(self) -> None:
        """Read no more."""
        self.is_closed = True

    def join_forward(self) -> None:
        """Record that another forward begins; the gap continues to its first call."""
        if not self.is_closed:
            self._is_forward = True
            self._join()

    def leave_hooks(self) -> None:
        """Record that the hooks after the model's forward have run."""
        if not self.is_closed and self.marks and self.marks[-1].kind == "root_exit":
            self._join()
            self.mark("root_exit")

    def _join(self) -> None:
        """Remove the last mark, because the running segment continues."""
        peak = self.marks.pop().peak_bytes
        self._least_peak_bytes = max(self._least_peak_bytes, peak)

    def enter(self, measured: Measured) -> int:
        """Mark a call's entry; return its index."""
        index = len(self.calls)
        self.calls.append(measured)
        self._is_in_call = True
        self.mark("enter", index)
        return index

    def leave(
        self, index: int, inputs: Sequence[torch.Tensor], output: Any
    ) -> tuple[int, ...]:
        """Mark a call's exit and wait for its first gradient.

        Returns:
            The ranks of the outputs, whose sizes are added to those of the inputs.
        """
        self.mark("exit", index)
        self._is_in_call = False
        outputs = list(tensors_in(output))
        shapes = [tuple(tensor.shape) for tensor in outputs]
        self.calls[index].sizes += tuple(itertools.chain(*shapes))
        given = {id(tensor) for tensor in inputs}
        for tensor in outputs:
            is_made = tensor.grad_fn is not None and id(tensor) not in given
            if tensor.requires_grad and is_made:
                tensor.register_hook(self._on_gradient(index))  # type: ignore[no-untyped-call]
        return tuple(map(len, shapes))

    def kept(
        self,
        index: int,
        forward: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        gauge: Gauge,
    ) -> Any:
        """Run a call that is kept, and count what it holds."""
        output, reading = gauge(forward, inputs)
        call = self.calls[index]
        call.precision = reading.precision
        call.count(reading.held_bytes, flops=0)
        call.copied_bytes = reading.copied_bytes
        call.largest_bytes = reading.largest_bytes
        return output

    def recomputed(self, index: int, gauge: Gauge) -> OnRecompute:
        """Return the `on_recompute` of a call: see Note: [Held bytes …]."""

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            is_own = self._is_in_call and index == len(self.calls) - 1
            if self._is_forward and not is_own:
                self._spoil(INNER_GRADIENT)
            if self.is_closed:
                return forward()
            self.mark("recompute", index)
            try:
                output, reading = gauge(forward, given)
            except RuntimeError as error:
                if is_out_of_memory(error):  # it runs again
                    self._spoil("a recomputation ran out of memory")
                raise
            call = self.calls[index]
            call.count(reading.held_bytes, reading.flops, reading.early_flops)
            call.copied_bytes = reading.copied_bytes
            call.precision = reading.precision
            call.largest_bytes = reading.largest_bytes
            call.kept_output_bytes = reading.saved_output_bytes
            if not self._meter.reads_peak:
                self._least_peak_bytes = self.marks[-1].live_bytes + reading.peak_bytes
            self.mark("recomputed", index)
            return output

        return run

    def _spoil(self, reason: str) -> None:
        """Stop reading, and say why nothing can be learned from what was read."""
        self.spoilt = reason
        self.is_closed = True

    def _on_gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            # A gradient inside a call's forward comes from a trial of its action.
            if self._is_in_call:
                return
            if self._is_forward:
                self._spoil(INNER_GRADIENT)
            elif not self.calls[index].has_gradient:
                self.calls[index].has_gradient = True
                self.mark("gradient", index)

        return hook


# ------------------------------------------------------------------ what follows


def analyse(marks: Sequence[Mark], calls: Sequence[Measured], menu: Menu) -> StepSample:
    """Turn a step's marks into samples of its segments.

    What a call holds after its exit is what was counted, or 0. The rest of the level
    belongs to the gap after it, so that all retained bytes add up. If a layer is called
    again, that call's graph holds the copies of weights that the first call dropped.

    Args:
        marks: The marks of one whole step, from ``start``.
        calls: The calls, in the order in which they ran.
        menu: The actions in use.
    """
    n_calls = Counter(call.layer for call in calls)
    for call in calls:
        if n_calls[call.layer] > 1:
            call.hold_copies()
    forward: dict[int, dict[str, float]] = {}
    gaps: list[SegmentSample] = []
    head, loss, turn = SegmentSample(None, None), None, None
    order: list[int] = []
    level = entry = float(marks[0].live_bytes)
    starts = [at for at, mark in enumerate(marks) if mark.kind == "gradient"]
    for before, mark in itertools.pairwise(marks):
        index = mark.call
        if mark.kind == "enter":
            gaps.append(_between(mark, level))
            level = entry = float(mark.live_bytes)
        elif mark.kind in ("ran", "exit"):
            call = calls[index]
            over = {call.action: max(0.0, mark.peak_bytes - entry)}
            forward.setdefault(index, over)
            if mark.kind == "exit":
                level = entry + call.held_bytes.get(call.action, 0.0)
        elif mark.kind == "root_exit":
            head = _between(mark, level)
            level = float(mark.live_bytes)
        elif mark.kind == "backward":
            turn = mark
        elif mark.kind == "gradient":
            loss = loss or _loss(turn, mark, level)
            order.append(index)
        elif mark.kind == "recomputed":  # it runs like a kept forward
            over = forward.setdefault(index, {})
            working = max(0.0, mark.peak_bytes - before.live_bytes)
            over[menu.first] = max(working, over.get(menu.first, 0.0))
    backward = {
        marks[begin].call: _backward_segment(marks[begin : end + 1], calls, menu)
        for begin, end in itertools.pairwise([*starts, len(marks) - 1])
    }
    samples = tuple(
        CallSample(
            index,
            call.held_bytes,
            forward.get(index, {}),
            *backward.get(index, ({}, {})),
            _cost(call, menu),
        )
        for index, call in enumerate(calls)
    )
    is_ordered = order == sorted(order, reverse=True)
    return StepSample(samples, tuple(gaps), head, loss, is_ordered, _copies_end(marks))


def without_readings(sample: StepSample) -> StepSample:
    """Keep the counts, and drop the readings.

    A process's first step maps libraries' code, starts threads and fills caches, so its
    readings do not predict the next.
    """
    nothing = SegmentSample(None, None)
    calls = [CallSample(e.call, e.held_bytes, {}, {}, {}, e.cost) for e in sample.calls]
    gaps = (nothing,) * len(sample.gaps)
    return replace(sample, calls=tuple(calls), gaps=gaps, head=nothing, loss=None)


def _between(mark: Mark, level: float) -> SegmentSample:
    return SegmentSample(mark.live_bytes - level, max(0.0, mark.peak_bytes - level))


def _loss(turn: Mark | None, mark: Mark, level: float) -> SegmentSample:
    """Return the loss segment, from the forward's end to the first gradient."""
    sample = _between(mark, level)
    if turn is None:
        return sample
    transient = max(sample.transient_bytes or 0.0, turn.peak_bytes - level)
    return SegmentSample(sample.retained_bytes, transient, mark.peak_bytes - level)


def _cost(call: Measured, menu: Menu) -> dict[str, float]:
    """Return the counted FLOPs, by the action that runs them again."""
    is_kept = call.action == menu.first  # its forward was not counted
    if menu.spec(call.action).rebuilds or (
        not call.flops and (is_kept or not call.held_bytes)
    ):
        return call.costs
    rerun = menu.least if call.action == menu.first else call.action
    return {**call.costs, rerun: float(call.early_flops or call.flops)}


def _copies_end(marks: Sequence[Mark]) -> str:
    """Return the segment in which copies of weights are freed; "" if there is none."""
    kept = [mark.kind for mark in marks if mark.keeps_copies]
    if "gradient" in kept or not kept:
        return ""
    return "loss" if "root_exit" in kept else "head"


def _backward_segment(
    marks: Sequence[Mark], calls: Sequence[Measured], menu: Menu
) -> tuple[dict[str, float], dict[str, float]]:
    """Return a backward's transient peak and retained bytes, by action."""
    arrival, index = marks[0].live_bytes, marks[0].call
    call, first = calls[index], menu.first
    held = call.held_bytes
    is_disturbed = any(  # another call's backward runs in it
        mark.kind == "recomputed" and mark.call != index for mark in marks
    )
    if is_disturbed or len(marks) < 2 or (call.action != first and not held):
        return {}, {}
    added = transient = 0.0
    for mark in marks[1:]:
        if mark.kind == "described":
            continue  # the peak of a comparison
        if mark.kind == "recomputed":
            added = held[first] - held[call.action]
        else:
            transient = max(transient, mark.peak_bytes - arrival - added)
    retained = marks[-1].live_bytes - arrival + held.get(call.action, 0.0)
    return {call.action: transient}, {call.action: retained} if held else {}
