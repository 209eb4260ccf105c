"""The memory limit: the budget, compared with what the process holds of its device.

Note: [Requested and reserved bytes]
Plans are made for the *level*: the bytes of a step's tensors, which can be predicted to
the byte. The budget limits what the process takes from the device. On a CPU both are
the resident set. On an accelerator the level is requested bytes, and the budget limits
reserved bytes: the allocator's segments, whose free parts no other process can use. A
budget of allocated bytes was once kept while the process ran out of memory: 1,181 MiB
were allocated, 1,376 reserved.

Note: [The wall]
The allocator takes a segment from the device when no free block is large enough, and
keeps it. If lengths jump, each free block is a little too small for the next length,
and the reserved bytes rise to several times the largest step. An allocator with a limit
(``set_per_process_memory_fraction``) frees its cached blocks at the limit and tries
again before it fails. So the session sets this limit to the budget, from a training
forward to the end of its backward, and frees no cached blocks by hand. When they were
freed before each step that might exceed the budget, 60 to 90% of the steps took new
segments, which cost more time than all recomputation (BERT-large on a 16 GiB card:
0.158 s a step, with the wall 0.068). The allocator checks its limit only when it takes
a segment. If more is reserved when the budget is lowered, or when a step begins (after
a larger optimizer step), the cached blocks are freed once.

At all other times the user's own limit holds: an optimizer's first step, an evaluation
or a generation never fails because of a session.

Note: [Room for the backward]
A forward that runs out of memory is run again; a backward in a plain loop cannot be. So
the allocator is read as a forward ends. What the backward can get for certain is what
is not reserved. That must be its growth, in whole blocks of its largest tensor, and two
at least: what it frees meanwhile may lie in pieces that fit none, and a smaller request
may split the place of one. (Of 203 backwards of T5-large and Llama-8B near the wall 37
needed more than 1.1 bytes for each byte of growth, up to 1.22. Such blocks were enough
for all, to 1%. Expandable segments need no whole blocks, and no more than the growth:
with 1.1 bytes for each 3.2% of two products' forwards ran again, in vain.) Cached
segments in which nothing is in use can be freed. They are, if less is there, and less
than twice that with them. If that is not enough, these blocks are taken at once, also
from gaps, and freed again. If they cannot be had, the forward runs again: first under
the same plan in the clean pool, then with everything recomputed, if the plan keeps
something. If neither can help, or the forward cannot run again (it has edited its
input, or other ranks wait), the backward may pass the budget by the grace. None of 45
runs of 500 steps with large blocks and expandable segments ends in a backward, and
0.04% of the forwards run again (`benchmarks.proofs backward`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mimose.budget import format_bytes
from mimose.cost.problem import Memory
from mimose.inputs.placement import only_device
from mimose.inputs.sharding import own_parameters
from mimose.memory.meters import AllocatorMeter, Meter, Usage
from mimose.predictors import FragmentationAllowance, LearnedLimit
from mimose.records import Peaks
from mimose.tensors import storages_in
from mimose.torch_private import NO_GRAPH_TASK, allocator_settings, current_graph_task

# ------------------------------------------------------------ optimizer


OptimizerKind: TypeAlias = Literal["own", "copy", "other"]
"""Whose parameters it holds: the model's, others of the same shapes, or others."""


class OptimizerWatch:
    """Finds the optimizers of the model's parameters, when they step.

    Args:
        model: The model.
        memory_limit: Its wall is dropped before each optimizer step outside a backward.
        on_step: Called before such a step.
        on_stepped: Each is called after each optimizer's step, with whose parameters it
            holds: the model's, others of the same shapes, as of a copy, or quite
            others.

    Attributes:
        n_steps: How many optimizer steps there were, outside of a backward.
    """

    def __init__(
        self,
        model: nn.Module,
        memory_limit: MemoryLimit,
        on_step: Callable[[], None],
        on_stepped: Sequence[Callable[[OptimizerKind], None]],
    ) -> None:
        self._memory_limit = memory_limit
        self._on_step, self._on_stepped = on_step, on_stepped
        self._model = weakref.ref(model)  # hooks of all optimizers refer to this
        self._device = only_device(model)
        self.n_steps = 0
        self._known: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[OptimizerKind, int]
        ]
        self._known = weakref.WeakKeyDictionary()
        """The optimizers that have stepped: whose parameters they hold, and in how many
        groups, because later groups may hold the model's."""
        self._handles: list[RemovableHandle] = []

    @property
    def state_bytes(self) -> int:
        """Bytes that the state of these optimizers holds on the model's device."""
        known = self._known.items()
        own = [optimizer for optimizer, (kind, _) in known if kind == "own"]
        storages = storages_in([optimizer.state for optimizer in own]).values()
        return sum(s.nbytes() for s in storages if s.device == self._device)

    @property
    def have_stepped(self) -> bool:
        """Whether an optimizer of the model has stepped, so that its state exists."""
        return any(kind == "own" for kind, _ in self._known.values())

    def are_due(self, n_steps: int) -> bool:
        """Whether there are gradients that no optimizer step has used yet.

        Args:
            n_steps: How many there were when a window began.
        """
        model = self._model()
        if self.n_steps > n_steps or model is None:
            return False
        return any(p.grad is not None for p in own_parameters(model))

    def start(self) -> None:
        """Set the hooks, which torch has for all optimizers together."""
        self._handles.append(register_optimizer_step_pre_hook(self._pre))
        self._handles.append(register_optimizer_step_post_hook(self._post))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre(self, *_: Any) -> None:
        if current_graph_task() == NO_GRAPH_TASK:
            self.n_steps += 1
            if self._memory_limit.has_wall:
                self._memory_limit.drop_wall()
            self._on_step()

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if model is None:
            return
        kind, n_groups = self._known.get(optimizer, ("other", 0))
        if kind != "own" and n_groups != len(optimizer.param_groups):
            kind = _kind_of(optimizer, own_parameters(model))
            self._known[optimizer] = kind, len(optimizer.param_groups)
        for told in self._on_stepped:
            told(kind)


def _kind_of(
    optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter]
) -> OptimizerKind:
    """Return whose parameters an optimizer holds."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ids = set(map(id, own))
    if any(id(parameter) in ids for parameter in held):
        return "own"
    trained = [parameter.shape for parameter in own if parameter.requires_grad]
    return "copy" if sorted(trained) == sorted(p.shape for p in held) else "other"


# ------------------------------------------------------------ wall

_log = logging.getLogger(__name__)

_MOST_ASKED = 0.5
"""A single request for a larger share of the budget fails because of its size alone."""
_SEGMENT_BYTES = 20 * 2**20
"""The segment for a tensor of 1 to 10 MiB, and the step by which expandable segments
grow. The last segment must fit whole."""
_SCALES = 4
"""Budget scales in a factor of two. Of a BERT whose budget moved, one step in 20 needed
a ratio above 1.42 at 3.6 GiB, 1.35 at 4.6, 1.31 at 5.7, 1.22 at 8.9."""
_EXPANDABLE_PRIOR = 1.08
"""The first allowance for fragmentation with expandable segments."""
_EXPANDABLE_RATIO, _WORTH_SAYING = 1.02, 1.1
"""What the allowance becomes with them, and from which one on a message says so."""
_AMPLE, _ENOUGH = 2.0, 1.1
"""Free bytes for each byte that a backward needs, if cached segments are counted, and
for each by which it grows, but for expandable segments. The allocator rounds requests
up."""


class MemoryLimit:
    """A limit of the level itself: of the resident set, or of a user's meter.

    Args:
        meter: Reads the level.
        budget_bytes: The budget.

    Attributes:
        budget_bytes: The present budget.
        peak_bytes: The highest reading of what the budget limits.
        has_wall: Whether the allocator can enforce the budget.
    """

    has_wall = False

    def __init__(self, meter: Meter, budget_bytes: int) -> None:
        self._meter = meter
        self.budget_bytes = budget_bytes
        self._limit = LearnedLimit()
        """The most to plan for, after memory ran out below the budget."""
        self._limits = {_scale(budget_bytes): self._limit}
        """Such limits by the scale of the budget."""
        meter.reset_peak()
        self.peak_bytes = meter.live_bytes()
        self._is_closed = False

    def close(self) -> None:
        """Record that the session has ended, and read no more peaks."""
        self._is_closed = True
        self.drop_wall()

    def move(self, budget_bytes: int) -> None:
        """Change the budget, between steps.

        Args:
            budget_bytes: The budget.
        """
        self.drop_wall()
        self.budget_bytes = budget_bytes
        self._limit = self._limits.setdefault(_scale(budget_bytes), LearnedLimit())

    def least_bytes(self) -> int:
        """Return what is held now, which is the least that any plan needs."""
        return self._meter.settled_bytes(0)

    def fold(self, level_bytes: int = 0) -> Peaks:
        """Read the peaks since the last reset into the session's.

        Args:
            level_bytes: The highest level that was read before that reset.
        """
        peak = max(level_bytes, self._meter.peak_bytes())
        self.peak_bytes = max(self.peak_bytes, peak)
        return Peaks(peak)

    def begin(self) -> tuple[int, Peaks]:
        """Return the level that a step starts from, and the peaks before it."""
        peaks = self.fold()
        return self._meter.settled_bytes(5 * self._meter.noise_bytes), peaks

    def highest_bytes(self) -> int:
        """Return the session's highest reading of what the budget limits."""
        if not self._is_closed:
            self.fold()
        return self.peak_bytes

    def memory(self, start_bytes: float, host_budget_bytes: float) -> Memory:
        """Return what a step starts with, and the highest level that it may reach.

        Args:
            start_bytes: The level at its start.
            host_budget_bytes: The budget of host memory.
        """
        most = min(self.budget_bytes, self._limit.bytes)
        return Memory(most, float(start_bytes), 0.0, host_budget_bytes)

    def raise_wall(self, *, keeps_grace: bool = False) -> None:
        """Make the allocator enforce the budget, if it can.

        Args:
            keeps_grace: Whether what `allow_grace` has allowed holds on.
        """

    def drop_wall(self) -> None:
        """Restore the user's own limit. A second call does nothing."""

    def beyond_wall(self, asked_bytes: int) -> int:
        """Return what would be reserved without the wall; 0 if it was not reached.

        Args:
            asked_bytes: The size of the failed request.
        """
        del asked_bytes
        return 0

    def forward_ended(self) -> tuple[int, int]:
        """Record that a step's forward has ended.

        Returns:
            The level now, and its peak since the last reset; 0 if neither is needed.
        """
        return 0, 0

    def has_room(self, level_bytes: float, block_bytes: int, *, tries: bool) -> bool:
        """Return whether the backward has room: Note: [Room for the backward].

        Args:
            level_bytes: The level up to which it may grow.
            block_bytes: The largest block that it asks for; 0 if not known.
            tries: Whether such blocks may be taken, to see if gaps have room for them.
        """
        del level_bytes, block_bytes, tries
        return True

    def allow_grace(self, grace_bytes: int) -> bool:
        """Let the backward pass the budget, as a last resort.

        Args:
            grace_bytes: By how much.

        Returns:
            Whether the allocator enforces the budget, so that this has an effect.
        """
        del grace_bytes
        return False

    def observe(self) -> None:
        """Record that a step's backward has ended without an error."""
        self._limit.step(self.budget_bytes)

    def ran_out(self, asked_bytes: int = 0) -> None:
        """Record that an allocation has failed, before anything is freed.

        Args:
            asked_bytes: The size of the failed request; 0 if not known.
        """
        del asked_bytes
        if self._meter.reads_peak:
            self._limit.ran_out(self._meter.peak_bytes())

    def summary(self) -> dict[str, Any]:
        """Return the fields of a `Summary` that only an allocator's limit has."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned.

        Args:
            state: What ``state_dict`` returned.
        """


class ReservedMemoryLimit(MemoryLimit):
    """A limit of a caching allocator's reserved bytes: Note: [The wall].

    Args:
        meter: Reads the allocator.
        budget_bytes: The budget of reserved bytes.
        has_wall: Whether the allocator enforces it.
    """

    def __init__(
        self, meter: AllocatorMeter, budget_bytes: int, *, has_wall: bool
    ) -> None:
        super().__init__(meter, budget_bytes)
        self._allocator = meter
        self._wall = Wall(meter) if has_wall else None
        self.has_wall = has_wall
        is_expandable = has_expandable_segments()
        self._has_warned = is_expandable
        self._grace_bytes = 0
        """By how much the backward to come may pass the budget."""
        self._level_bytes = 0
        """The step's highest level before blocks were tried."""
        self._granule = _SEGMENT_BYTES if is_expandable else 0
        """An expandable segment grows by whole granules, the last one past the wall."""
        prior = (_EXPANDABLE_PRIOR,) if is_expandable else ()
        self._allowance = FragmentationAllowance(*prior)
        self._allowances = {_scale(budget_bytes): self._allowance}
        self._start = self._usage = meter.usage()
        self._start_anew()
        self._noted_ooms = self._usage.n_ooms
        self._n_retries = self._usage.n_retries
        self.peak_bytes = self._usage.reserved_bytes

    def move(self, budget_bytes: int) -> None:
        """Change the budget, and free the cached blocks above it.

        With a smaller budget gaps are a larger share of a step. So budgets that are far
        apart have their own allowance, which starts from the last one.
        """
        super().move(budget_bytes)
        new = FragmentationAllowance(self._allowance.at_first)
        self._allowance = self._allowances.setdefault(_scale(budget_bytes), new)
        if self._read().reserved_bytes > budget_bytes:
            torch.accelerator.empty_cache()

    def least_bytes(self) -> int:
        """Return the allocated bytes."""
        return self._read().allocated_bytes

    def fold(self, level_bytes: int = 0) -> Peaks:
        """Read all peaks since the step began, in one reading."""
        usage = self._read()
        self.peak_bytes = max(self.peak_bytes, usage.reserved_peak_bytes)
        return Peaks(
            max(level_bytes, self._level_bytes, usage.requested_peak_bytes),
            usage.reserved_peak_bytes,
            usage.n_retries - self._start.n_retries,
        )

    def begin(self) -> tuple[int, Peaks]:
        """Return the requested bytes at a step's start, and the peaks before it."""
        peaks = self.fold()
        self._note_out_of_memory()
        if self._wall is not None and self._usage.reserved_bytes > self.budget_bytes:
            torch.accelerator.empty_cache()
            self._read()
        self._start_anew()
        return self._usage.requested_bytes, peaks

    def memory(self, start_bytes: float, host_budget_bytes: float) -> Memory:
        """Return the requested bytes that keep the reserved ones within the limit."""
        room, ratio = self._room_bytes, self._allowance.value
        more = start_bytes - self._start.requested_bytes + self._segment_bytes
        most = start_bytes + max(0.0, room - more) / ratio
        return Memory(most, float(start_bytes), 0.0, host_budget_bytes, ratio)

    @property
    def _room_bytes(self) -> float:
        most = min(self.budget_bytes, self._limit.bytes)
        return max(0.0, most - self._start.allocated_bytes)

    @property
    def _segment_bytes(self) -> float:
        return min(_SEGMENT_BYTES, self._room_bytes / 4.0)  # less for a tiny budget

    @property
    def _wall_bytes(self) -> int:
        return self.budget_bytes - min(self._granule, self.budget_bytes // 8)

    def raise_wall(self, *, keeps_grace: bool = False) -> None:
        """Make the allocator enforce the budget."""
        if not keeps_grace:
            self._grace_bytes = self._level_bytes = 0
        if self._wall is not None and not self._is_closed:
            self._wall.stand(self._wall_bytes + self._grace_bytes)

    def drop_wall(self) -> None:
        """Restore the user's own limit. A second call does nothing."""
        if self._wall is not None:
            self._wall.fall()

    def beyond_wall(self, asked_bytes: int) -> int:
        """Return what would be reserved without the wall; 0 if it was not reached.

        Args:
            asked_bytes: The size of the failed request.
        """
        wanted = self._usage.reserved_bytes + asked_bytes
        there = self._allocator.total_bytes()
        stands = self._wall is not None and self._wall.stands
        is_beyond = stands and wanted > self.budget_bytes
        return wanted if is_beyond and (there is None or wanted <= there) else 0

    def forward_ended(self) -> tuple[int, int]:
        """Learn how much fragmentation adds to what the forward has kept."""
        usage, start = self._read(), self._start
        taken = usage.allocated_bytes - start.allocated_bytes + usage.gap_bytes
        requested = usage.requested_bytes - start.requested_bytes
        self._allowance.observe(requested, taken, self._room_bytes)
        return usage.requested_bytes, usage.requested_peak_bytes

    def has_room(self, level_bytes: float, block_bytes: int, *, tries: bool) -> bool:
        """Return whether the backward has room: Note: [Room for the backward]."""
        usage, most = self._usage, min(self._wall_bytes, self._limit.bytes)
        asked = max(0.0, level_bytes - usage.requested_bytes)
        asked *= 1.0 if self._granule else _ENOUGH  # expandable segments join
        has_blocks = block_bytes > 0 and not self._granule
        if has_blocks:
            asked = max(2.0, math.ceil(asked / block_bytes)) * block_bytes
        needed = asked + self._segment_bytes / 4.0
        cached = usage.reserved_bytes - usage.allocated_bytes - usage.gap_bytes
        free = most - usage.reserved_bytes
        if free >= needed or free + cached >= _AMPLE * needed:
            return True
        torch.accelerator.empty_cache()
        reserved = self._read().reserved_bytes
        # Only this shows the gaps of expandable segments.
        held = usage.requested_bytes - self._start.requested_bytes
        taken = reserved - self._start.allocated_bytes
        self._allowance.observe(held, taken, self._room_bytes)
        if most - reserved >= needed:
            return True
        return tries and has_blocks and self._has_blocks(asked, block_bytes)

    def _has_blocks(self, n_bytes: float, block_bytes: int) -> bool:
        """Take bytes in blocks at once, and free them; return whether that could be."""
        block = max(block_bytes, math.ceil(self._segment_bytes))
        n_blocks = math.ceil(n_bytes / block)
        self._level_bytes = max(self._level_bytes, self._usage.requested_peak_bytes)
        blocks: list[torch.Tensor] = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while len(blocks) < n_blocks:
                device = self._allocator.device
                blocks.append(torch.empty(block, dtype=torch.int8, device=device))
        n_found = len(blocks)
        blocks.clear()
        self._noted_ooms = self._read().n_ooms
        self._allocator.reset_peak()
        return n_found == n_blocks

    def allow_grace(self, grace_bytes: int) -> bool:
        """Let the backward pass the budget, as a last resort."""
        if self._wall is None or not self._wall.stands or not grace_bytes:
            return False
        self._grace_bytes = grace_bytes
        self.raise_wall(keeps_grace=True)
        return True

    def observe(self) -> None:
        """Record that a step's backward has ended without an error.

        Once the allowance for fragmentation is learned, one message tells its price. An
        earlier out-of-memory error of this step was caught by other code: cuDNN, for
        example, then tries an engine with a smaller workspace.
        """
        super().observe()
        self._noted_ooms = self._usage.n_ooms
        ratio = self._allowance.value
        if self._has_warned or not self._allowance.is_learned or ratio < _WORTH_SAYING:
            return
        self._has_warned = True
        _log.warning(
            "mimose: %.2f bytes are reserved for each byte of a step, so plans can use "
            "%s of %s. With expandable segments it is about %.2f: start the program "
            "with PYTORCH_ALLOC_CONF=expandable_segments:True",
            ratio,
            format_bytes(self._room_bytes / ratio),
            format_bytes(self._room_bytes),
            _EXPANDABLE_RATIO,
        )

    def ran_out(self, asked_bytes: int = 0) -> None:
        """Record that an allocation has failed, before anything is freed."""
        self._read()
        self._note_out_of_memory(asked_bytes)

    def _note_out_of_memory(self, asked_bytes: int = 0) -> None:
        """Plan for less than what was reserved when an allocation failed.

        Another process may hold a part of the device, or gaps may be larger than the
        allowance.
        """
        usage = self._usage
        if usage.n_ooms == self._noted_ooms:
            return
        self._noted_ooms = usage.n_ooms
        reached = usage.reserved_peak_bytes
        if asked_bytes and self.beyond_wall(asked_bytes):
            if asked_bytes > _MOST_ASKED * self.budget_bytes:
                return
            reached = max(reached, self.budget_bytes - asked_bytes)
        has_grown = reached > self._start.reserved_bytes
        if has_grown or usage.n_retries > self._start.n_retries:
            self._limit.ran_out(reached)

    def summary(self) -> dict[str, Any]:
        """Return the allowance for fragmentation, and the allocator's flushes."""
        flushes = self._usage.n_retries - self._n_retries
        return {"fragmentation": self._allowance.value, "flushes": flushes}

    def state_dict(self) -> dict[str, Any]:
        """Return the allowance."""
        return {"allowance": self._allowance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load another allocator's allowance, if there is one."""
        if "allowance" in state:
            self._allowance.load_state_dict(state["allowance"])

    def _start_anew(self) -> None:
        """Start new peaks at the last reading."""
        self._start = self._usage
        self._allocator.reset_peak()
        self._allocator.forget_usage()

    def _read(self) -> Usage:
        self._usage = self._allocator.usage()
        return self._usage


def _scale(budget_bytes: int) -> int:
    return round(_SCALES * math.log2(budget_bytes))


def make_memory_limit(
    meter: Meter, budget_bytes: int, *, has_wall: bool
) -> MemoryLimit:
    """Return the limit for what a meter reads.

    Args:
        meter: Reads the memory.
        budget_bytes: The budget.
        has_wall: Whether an accelerator's allocator enforces it.
    """
    if isinstance(meter, AllocatorMeter):
        return ReservedMemoryLimit(meter, budget_bytes, has_wall=has_wall)
    return MemoryLimit(meter, budget_bytes)


# ------------------------------------------------------------------ the allocator


standing: dict[int, dict[Wall | None, float]] = {}
"""By device: the active walls, and under None the user's own limit. The lowest one
holds."""


class Wall:
    """A limit of a device's allocator, which can be switched on and off.

    Args:
        meter: The meter of the device.
    """

    def __init__(self, meter: AllocatorMeter) -> None:
        self._index = meter.index
        module = torch.get_device_module(meter.device)
        self._put: Callable[[float, int], None] | None
        self._put = getattr(module, "set_per_process_memory_fraction", None)
        self._get = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)
        self._total_bytes = meter.memory_info()[1]
        if self._put is None:
            _log.warning(
                "mimose: torch.%s has no set_per_process_memory_fraction, so nothing "
                "enforces the budget: leave more memory free",
                meter.device.type,
            )

    @property
    def stands(self) -> bool:
        """Whether the limit is active."""
        return self in standing.get(self._index, ())

    def stand(self, n_bytes: int) -> None:
        """Activate the limit, or move it.

        Args:
            n_bytes: The most bytes that the allocator may reserve.
        """
        share = min(1.0, n_bytes / self._total_bytes)
        walls = standing.get(self._index, {})
        if self._put is None or walls.get(self) == share:
            return
        walls = standing.setdefault(self._index, walls)
        walls.setdefault(None, float(self._get(self._index)))
        walls[self] = share
        self._put(min(walls.values()), self._index)

    def fall(self) -> None:
        """Restore the earlier limit. A second call does nothing."""
        if self._put is None or not self.stands:
            return
        walls = standing[self._index]
        del walls[self]
        self._put(min(walls.values()), self._index)
        if len(walls) == 1:
            del standing[self._index]


def has_expandable_segments() -> bool:
    """Whether the allocator's settings switch expandable segments on."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    given = [os.environ.get(name, "") for name in names]
    text = ",".join([*given, allocator_settings()]).replace(" ", "").lower()
    return "expandable_segments:true" in text
