"""What a caching allocator has reserved, and the wall that keeps it within the budget.

Note: [The wall]
Segments are taken from the device when no free block is large enough, and stay. Lengths
that jump leave blocks that are each a little too small for the next length, and the
reserved bytes rise to several times the largest step. An allocator that has a limit
(``set_per_process_memory_fraction``) frees its cached blocks at the limit and tries
again, before it fails. So the budget is made that limit, from a training forward to the
end of its backward, and nothing frees cached blocks by hand. Freed before each step
that might pass the budget, their segments were taken anew in 60 to 90% of the steps,
which took more time than all recomputation (BERT-large on a 16 GiB card 0.158 s a step,
with the wall 0.068). The allocator looks at its limit only when it takes a segment.
Where more is reserved as a step begins (the budget was lowered, or an optimizer's step
was larger), the cached blocks are freed once.

Outside of that the user's own limit holds: an optimizer's first step, an evaluation or
a generation never fails because of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mimose.memory.footprint import Footprint
from mimose.memory.meters import AllocatorMeter, Meter
from mimose.memory.meters.usage import Usage, has_expandable_segments
from mimose.predictors import FragmentationAllowance
from mimose.records import Peaks

_MOST_ASKED = 0.5
"""What asks for more of the budget at once fails for its own size."""
_EXPANDABLE_PRIOR = 1.08
"""The allowance at first, where segments grow."""


class ReservedFootprint(Footprint):
    """What a caching allocator has reserved: Note: [The wall].

    Args:
        meter: Reads the allocator.
        budget_bytes: The budget, of reserved bytes.
        has_wall: Whether the allocator is to keep it.
        is_kept: Whether it is kept at all; a baseline does as it would by itself.
    """

    def __init__(
        self,
        meter: AllocatorMeter,
        budget_bytes: int,
        *,
        has_wall: bool,
        is_kept: bool = True,
    ) -> None:
        super().__init__(meter, budget_bytes)
        self._allocator = meter
        self._budget_bytes = budget_bytes
        self._has_wall = has_wall and is_kept
        self._is_kept = is_kept
        self._fall: Callable[[], None] | None = None
        prior = (_EXPANDABLE_PRIOR,) if has_expandable_segments() else ()
        self._allowances = [FragmentationAllowance(*prior) for _ in range(2)]
        self.allowance = self._allowances[False]
        self._start = self._usage = meter.usage()
        self._start_anew()
        self._noted_ooms = self._usage.n_ooms
        self._n_retries = self._usage.n_retries
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
        self._note_out_of_memory()
        if self._is_kept and self._usage.reserved_bytes > self._budget_bytes:
            self._allocator.give_back()
            self._read()
        self._start_anew()
        return self._usage.requested_bytes, peaks

    def highest_bytes(self, optimizer_peak_bytes: int) -> int:
        """Return the most reserved bytes; readings around optimizer steps are in it."""
        del optimizer_peak_bytes
        if not self.is_closed:
            self.fold()
        return self.peak_bytes

    def level_budget(self, start_bytes: float) -> float:
        """Return the requested bytes that keep the reserved ones within the limit."""
        return start_bytes + self._room_bytes / self.allowance.value

    def reserved_ratio(self, start_bytes: float) -> float:
        """Return the reserved bytes counted for each requested byte of growth."""
        del start_bytes
        return self.allowance.value

    def use_loss(self, *, is_by_rows: bool) -> bool:
        """Count with the allowance of steps with such a loss from now on."""
        before, self.allowance = self.allowance, self._allowances[is_by_rows]
        return before is not self.allowance

    @property
    def _room_bytes(self) -> float:
        return max(0.0, self.limit.bytes - self._start.allocated_bytes)

    def raise_wall(self) -> None:
        """Let the allocator keep the limit from now on."""
        if self._has_wall and self._fall is None and not self.is_closed:
            self._fall = self._allocator.wall(self._budget_bytes)

    def drop_wall(self) -> None:
        """Let the user's own limit hold again. Harmless twice."""
        fall, self._fall = self._fall, None
        if fall is not None:
            fall()

    def beyond_wall(self, asked_bytes: int) -> int:
        """Return what would be taken now, had the wall not refused it; 0 if it did not.

        Args:
            asked_bytes: Of the allocation that has failed.
        """
        wanted = self._usage.reserved_bytes + asked_bytes
        there = self._allocator.total_bytes()
        is_beyond = self._fall is not None and wanted > self._budget_bytes
        return wanted if is_beyond and (there is None or wanted <= there) else 0

    def close(self) -> None:
        """Take note that the session has ended; what is held then is not its doing."""
        super().close()
        self.drop_wall()

    def forward_ended(self) -> None:
        """Learn what fragmentation takes beside what the forward has kept."""
        usage, start = self._read(), self._start
        taken = usage.allocated_bytes - start.allocated_bytes + usage.gap_bytes
        requested = usage.requested_bytes - start.requested_bytes
        self.allowance.observe(requested, taken, self._room_bytes)

    def observe(self, growth_bytes: int) -> None:
        """Take note of a step's growth of the level, as its backward has ended.

        An out-of-memory before that was caught by somebody who went on: cuDNN, for one,
        tries an engine with a smaller workspace then.
        """
        super().observe(growth_bytes)
        self._noted_ooms = self._usage.n_ooms

    def ran_out(self, asked_bytes: int = 0) -> None:
        """Take note that an allocation has failed, before anything is given back."""
        self._read()
        self._note_out_of_memory(asked_bytes)

    def _note_out_of_memory(self, asked_bytes: int = 0) -> None:
        """Plan for less than what was reserved as an allocation failed.

        Others may hold a part of the device, or gaps are larger than was allowed for.
        """
        usage = self._usage
        if usage.n_ooms == self._noted_ooms:
            return
        self._noted_ooms = usage.n_ooms
        reached = usage.reserved_peak_bytes
        if asked_bytes and self.beyond_wall(asked_bytes):
            if asked_bytes > _MOST_ASKED * self._budget_bytes:
                return
            reached = max(reached, self._budget_bytes - asked_bytes)
        has_grown = reached > self._start.reserved_bytes
        if has_grown or usage.n_retries > self._start.n_retries:
            self.limit.ran_out(reached)

    def told(self) -> dict[str, Any]:
        """Return the allowance for fragmentation, and the allocator's flushes."""
        flushes = self._usage.n_retries - self._n_retries
        return {"fragmentation": self.allowance.value, "flushes": flushes}

    def state_dict(self) -> dict[str, Any]:
        """Return the allowances."""
        return {"allowances": [each.state_dict() for each in self._allowances]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another allocator's allowance, if there is one."""
        before = [state["allowance"]] * 2 if "allowance" in state else ()
        told = state.get("allowances", before)
        for own, said in zip(self._allowances, told, strict=False):
            own.load_state_dict(said)

    def _start_anew(self) -> None:
        """Let the peaks begin at what was read last."""
        self._start = self._usage
        self._allocator.reset_peak()
        self._allocator.forget_usage()

    def _read(self) -> Usage:
        self._usage = self._allocator.usage()
        return self._usage


def make_footprint(
    meter: Meter, budget_bytes: int, *, has_wall: bool, is_kept: bool
) -> Footprint:
    """Return the footprint that a meter can tell.

    Args:
        meter: Reads the memory.
        budget_bytes: The budget.
        has_wall: Whether an accelerator's allocator is to keep it.
        is_kept: Whether it is kept at all; a baseline does as it would by itself.
    """
    if isinstance(meter, AllocatorMeter):
        how = {"has_wall": has_wall, "is_kept": is_kept}
        return ReservedFootprint(meter, budget_bytes, **how)
    return Footprint(meter, budget_bytes)
