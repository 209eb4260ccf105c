"""What a caching allocator has reserved, against the budget.

Note: [Reserved bytes]
Segments are taken when no free block is large enough, and stay. Lengths that jump leave
blocks that are each a little too small for the next length, and reserved bytes rise to
several times the largest step. Planned for that ratio, most of a budget would lie idle.
So a step that might not find its memory among the free blocks begins with none of them:
they are given back to the device first. What such a step then takes is its growth times
a ratio that depends on the model and is learned (`FragmentationRatio`). Free parts of
segments in which something lives stay; a step uses some of them, now more and now less,
and two steps of a ResNet passed their budget where it was fewer than before. So the
ratio is learned twice, with what is beyond the start and with all that is beyond what
lives, and both have to keep the limit. Giving back costs the host a wait and the step
its calls to the device's allocator, so it is done only where the step could pass the
limit, and not where the same plan at the same sizes has run since the last time.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mimose.measure.meters import AllocatorMeter, Meter
from mimose.measure.meters.usage import Usage, has_expandable_segments
from mimose.predictors import FragmentationRatio
from mimose.records import Peaks
from mimose.run.footprint import Footprint

_log = logging.getLogger(__name__)

_LEAST_CACHED_BYTES = 2**20
"""Less than this is not worth giving back."""
_TELLING = 0.5
"""A failure outside of a forward with less of the limit reserved was of a request
beyond all measure, and tells nothing of it."""
_MOST_SERVED = 10_000
"""Steps whose blocks are known to be there; then all are forgotten."""
_SEGMENT_BYTES = 2**21
"""Reserved bytes come in multiples of it."""
_OFTEN = 10
"""Free blocks given back so many times are worth a word."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Reserved bytes for each byte of growth, of three kinds of steps."""

    fresh: FragmentationRatio = field(default_factory=FragmentationRatio)
    """Of what a step takes beyond what it begins with."""
    whole: FragmentationRatio = field(default_factory=FragmentationRatio)
    """The same with the free parts of segments in use, that it may use or not."""
    repeat: FragmentationRatio = field(
        default_factory=lambda: FragmentationRatio(prior=0.15, floor=0.0)
    )
    """Of plans that have run at these sizes before: what came between, such as an
    optimizer's step, may have split the blocks that they had."""


class ReservedFootprint(Footprint):
    """What a caching allocator has reserved: Note: [Reserved bytes].

    Args:
        meter: Reads the allocator.
        budget_bytes: The budget, of reserved bytes.
        ratios: What is learned of reserved bytes.
    """

    def __init__(
        self, meter: AllocatorMeter, budget_bytes: int, ratios: Ratios | None = None
    ) -> None:
        super().__init__(meter, budget_bytes)
        self._allocator = meter
        ratios = ratios or Ratios()
        self.ratio, self._whole = ratios.fresh, ratios.whole
        self._repeat = ratios.repeat
        self._served: set[Hashable] = set()
        self._key: Hashable = None
        self._largest_bytes = 0.0
        self.n_given_back = -1  # what is given back now is none of the steps' doing
        """How often free blocks were given back before a step."""
        self._teaches: FragmentationRatio | None = None
        """What the running step tells of, if of any."""
        self._backward_peak_bytes = 0
        self._give_back()
        self._noted_ooms = self._usage.n_ooms
        self.peak_bytes = self._usage.reserved_bytes

    def note_level(self, level_bytes: int) -> None:
        """Do nothing: the level is not the footprint."""

    def least_bytes(self) -> int:
        """Return what the blocks in use take."""
        return self._read().allocated_bytes

    def fold(self) -> Peaks:
        """Read all peaks since the step began, in one reading."""
        usage = self._read()
        self.peak_bytes = max(self.peak_bytes, usage.reserved_peak_bytes)
        return Peaks(
            usage.requested_peak_bytes,
            usage.reserved_peak_bytes,
            usage.allocated_peak_bytes,
            usage.n_retries - self._start.n_retries,
        )

    def begin(self, slack_bytes: float) -> tuple[int, Peaks]:
        """Return the requested bytes that a step starts from, and the peaks before."""
        del slack_bytes
        peaks = self.fold()
        usage = self._usage
        if usage.n_ooms > self._noted_ooms:  # in a backward, or outside of the model
            if usage.reserved_peak_bytes > _TELLING * self.limit.bytes:
                self._note_out_of_memory(usage)
            self._noted_ooms = usage.n_ooms
        if usage.reserved_bytes < usage.reserved_peak_bytes:
            self._served.clear()  # somebody has given free blocks back
        self._start_anew()
        return usage.requested_bytes, peaks

    def highest_bytes(self, optimizer_peak_bytes: int) -> int:
        """Return the most reserved bytes; readings around optimizer steps are in it."""
        del optimizer_peak_bytes
        if not self.is_closed:
            self.fold()
        return self.peak_bytes

    def level_budget(self, start_bytes: float) -> float:
        """Return the requested bytes that keep the reserved ones within the limit."""
        most = _whole_segments(self.limit.bytes)
        live = self._start.allocated_bytes
        return start_bytes + min(
            max(0.0, most - live - self._overhead_bytes) / self.ratio.value,
            max(0.0, most - live) / self._whole.value,
        )

    def reserved_ratio(self, start_bytes: float) -> float:
        """Return the reserved bytes counted for each requested byte of growth."""
        growth = self.level_budget(start_bytes) - start_bytes
        room = _whole_segments(self.limit.bytes) - self._start.allocated_bytes
        return room / growth if growth > 0.0 else self.ratio.value

    def make_room(
        self, growth_bytes: float | None, key: Hashable, *, has_begun: bool = False
    ) -> None:
        """Give the free blocks back where the step might pass the limit with them."""
        growth = self._largest_bytes if growth_bytes is None else growth_bytes
        usage = self._start
        cached = usage.reserved_bytes - usage.allocated_bytes - self._overhead_bytes
        teaches = None
        if cached < _LEAST_CACHED_BYTES:
            teaches = self.ratio
        elif growth_bytes is not None and key in self._served:
            teaches = self._repeat
        self._teaches = teaches
        ratio = teaches or self.ratio
        expected = usage.reserved_bytes + growth * ratio.value
        if expected > _whole_segments(self.limit.bytes) and teaches is not self.ratio:
            if has_begun:
                self._give_back_within()
            else:
                self._give_back()
                self._teaches = self.ratio
            _tell_of_segments(self.n_given_back, self.ratio.value)
        self._key = key

    def observe(self, growth_bytes: int) -> None:
        """Learn how many reserved bytes the step's growth has taken.

        An out-of-memory before the end of its backward was caught by somebody who went
        on: cuDNN, for one, tries an engine with a smaller workspace then.
        """
        super().observe(growth_bytes)
        usage = self._usage
        self._noted_ooms = usage.n_ooms
        self._backward_peak_bytes = usage.reserved_peak_bytes
        self._largest_bytes = max(self._largest_bytes, growth_bytes)
        teaches, self._teaches = self._teaches, None
        is_fresh = teaches is self.ratio
        taken = usage.reserved_peak_bytes + (self.after_bytes if is_fresh else 0)
        if teaches is not None and usage.n_retries == self._start.n_retries:
            kind = self._key if is_fresh else None
            teaches.observe(growth_bytes, taken - self._start.reserved_bytes, kind)
            if is_fresh:
                beyond_live = taken - self._start.allocated_bytes
                self._whole.observe(growth_bytes, beyond_live, kind)
        if len(self._served) >= _MOST_SERVED:
            self._served.clear()
        self._served.add(self._key)

    def optimizer_stepped(self) -> None:
        """Learn what an optimizer's step reserves beyond the backward before it."""
        after = self._read().reserved_peak_bytes - self._backward_peak_bytes
        if self._backward_peak_bytes:
            self.after_bytes = max(self.after_bytes, after)

    def ran_out(self) -> None:
        """Take note that an allocation has failed, before anything is given back."""
        self._note_out_of_memory(self._read())

    def _note_out_of_memory(self, usage: Usage) -> None:
        """Lower the limit below what this step itself has reserved.

        Where it has not got beyond what was reserved before it, that says nothing of
        what can be had now; what is left of it after the allocator's own retry does.
        """
        has_grown = usage.reserved_peak_bytes > self._start.reserved_bytes
        held = usage.reserved_peak_bytes if has_grown else usage.reserved_bytes
        self.limit.ran_out(held)
        self._noted_ooms = usage.n_ooms

    def told(self) -> dict[str, Any]:
        """Return the ratio, and how often free blocks were given back."""
        return {"fragmentation": self.ratio.value, "given_back": self.n_given_back}

    def state_dict(self) -> dict[str, Any]:
        """Return the ratios' observations."""
        return {"ratio": self.ratio.state_dict(), "whole": self._whole.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another allocator's ratios, if there are any."""
        for name, ratio in (("ratio", self.ratio), ("whole", self._whole)):
            if name in state:
                ratio.load_state_dict(state[name])

    def needed_bytes(self, level_bytes: int) -> int:
        """Return the reserved bytes where the step began without free blocks.

        Else they are not all the step's doing, and what was requested is all that is
        certain.
        """
        is_fresh = self._teaches is self.ratio
        return self._usage.reserved_peak_bytes if is_fresh else level_bytes

    def _give_back(self) -> None:
        self._allocator.give_back()
        self._read()
        self._start_anew()
        self._overhead_bytes = self._start.reserved_bytes - self._start.allocated_bytes
        self._served.clear()
        self.n_given_back += 1

    def _give_back_within(self) -> None:
        """Give back within a step, whose peaks go on; it teaches nothing of ratios."""
        self._allocator.give_back()
        self._served.clear()
        self.n_given_back += 1
        self._teaches = None

    def _start_anew(self) -> None:
        """Let the peaks begin at what was read last."""
        self._start = self._usage
        self._allocator.reset_peak()
        self._allocator.forget_usage()

    def _read(self) -> Usage:
        self._usage = self._allocator.usage()
        return self._usage


def _whole_segments(limit_bytes: float) -> float:
    """Return a limit in whole segments, but for one that is not foreseen."""
    return (limit_bytes // _SEGMENT_BYTES - 1) * _SEGMENT_BYTES


def _tell_of_segments(n_given_back: int, ratio: float) -> None:
    """Say once what segments that grow would give, where many blocks are given back."""
    if n_given_back != _OFTEN or has_expandable_segments():
        return
    _log.warning(
        "mimose: free blocks of the allocator were given back before %d steps, to "
        "keep reserved memory within the budget, and %.0f%% of a step's growth are "
        "counted for fragmentation. Segments that can grow may make both less: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts "
        "(PYTORCH_CUDA_ALLOC_CONF before torch 2.9)",
        n_given_back,
        100.0 * (ratio - 1.0),
    )


def make_footprint(
    meter: Meter, budget_bytes: int, ratios: Ratios | None = None
) -> Footprint:
    """Return the footprint that a meter can tell."""
    if isinstance(meter, AllocatorMeter):
        return ReservedFootprint(meter, budget_bytes, ratios)
    return Footprint(meter, budget_bytes)
