"""What is held, reserved and refused, by the rules of CUDA's caching allocator."""

from __future__ import annotations

import random

import pytest
import torch

pytestmark = pytest.mark.sim

MIB = 2**20


def _count(name):
    return torch.accelerator.memory_stats(0)[name]


@pytest.mark.parametrize(
    ("requested", "held"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3146240)]
)
def test_sizes_are_multiples_of_512(take, numbers, requested, held):
    """What is asked for is rounded up to 512 bytes; both numbers are kept."""
    block = take(requested)

    assert {
        "requested_bytes": requested,
        "allocated_bytes": held,
        "active_bytes": held,
    } == numbers("requested_bytes", "allocated_bytes", "active_bytes")
    del block


@pytest.mark.parametrize(
    ("n_bytes", "reserved"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segment_sizes(sim, take, n_bytes, reserved):
    """2 MiB for up to 1 MiB, 20 MiB for up to 10 MiB, then multiples of 2 MiB."""
    block = take(n_bytes)

    assert reserved == sim.memory_reserved()
    del block


def test_free_neighbours_merge(sim, take, numbers):
    """Freed one by one, in any order, the blocks of a segment become one again."""
    first, middle, last = take(512), take(512), take(512)
    seen = [numbers("inactive_split", "inactive_split_bytes")]
    del first
    seen.append(numbers("inactive_split", "inactive_split_bytes"))
    del last  # merges with the rest of the segment
    seen.append(numbers("inactive_split", "inactive_split_bytes"))
    del middle
    seen.append(numbers("inactive_split", "inactive_split_bytes"))

    assert [
        (1, 2 * MIB - 3 * 512),
        (2, 2 * MIB - 2 * 512),
        (2, 2 * MIB - 512),
        (0, 0),
    ] == [tuple(each.values()) for each in seen]
    assert 2 * MIB == sim.memory_reserved()


@pytest.mark.parametrize("expandable", [False, True])
def test_a_freed_block_stays_with_its_stream(sim, take, expandable):
    """Another stream gets memory of its own, as on CUDA."""
    sim.set_expandable_segments(expandable)
    block = take(40 * MIB)
    del block
    held = sim.memory_reserved()
    again = take(40 * MIB)
    assert held == sim.memory_reserved()
    del again
    with sim.stream(sim.Stream()):
        other = take(40 * MIB)
    assert 2 * held == sim.memory_reserved()
    del other
    sim.empty_cache()
    assert 0 == sim.memory_reserved()


def test_empty_cache_releases_segments_that_are_wholly_free(sim, take):
    """A segment of which 512 bytes are held stays; the other goes."""
    held, freed = take(512), take(20 * MIB)
    del freed
    sim.empty_cache()

    assert 2 * MIB == sim.memory_reserved()
    assert (2, 1) == (_count("num_device_alloc"), _count("num_device_free"))
    del held


def test_peaks_stay_until_they_are_reset(sim, take):
    """Both peaks keep the highest; a reset begins anew at what is held."""
    held, freed = take(512), take(20 * MIB)
    del freed
    sim.empty_cache()
    peaks = sim.max_memory_allocated(), sim.max_memory_reserved()
    sim.reset_peak_memory_stats()

    assert (20 * MIB + 512, 22 * MIB) == peaks
    assert (512, 2 * MIB) == (sim.max_memory_allocated(), sim.max_memory_reserved())
    del held


def test_over_the_limit_cached_segments_are_released_first(sim, take, numbers):
    """A segment of 30 MiB beside a cached one of 20 would be over 40: one retry."""
    sim.set_limit(40 * MIB)
    block = take(20 * MIB)
    del block
    take(30 * MIB)

    assert {"reserved_bytes": 30 * MIB} == numbers("reserved_bytes")
    assert (1, 0) == (_count("num_alloc_retries"), _count("num_ooms"))


def test_what_cannot_be_released_is_out_of_memory(sim, take):
    """11 of 20 MiB are free, but in one segment with 9 that are held."""
    sim.set_limit(20 * MIB)
    held, freed = take(9 * MIB), take(9 * MIB)
    del freed
    with pytest.raises(torch.OutOfMemoryError) as caught:
        take(12 * MIB)

    assert (1, 1) == (_count("num_alloc_retries"), _count("num_ooms"))
    assert "Tried to allocate 12.00 MiB" in str(caught.value)
    assert "9.00 MiB is allocated" in str(caught.value)
    del held


def test_garbage_is_collected_by_age(sim, take, numbers):
    """Over the threshold, cached segments of at least average age are released.

    When 26 MiB are asked for, 66 are reserved, 16 over half the limit. Two searches
    lie behind the free 22 MiB and three behind the free 20: these go, and do.
    """
    sim.set_limit(100 * MIB)
    sim.set_garbage_collection_threshold(0.5)
    for size in (20, 22):
        take(size * MIB)
    held = [take(24 * MIB), take(26 * MIB)]

    assert {"reserved_bytes": (22 + 24 + 26) * MIB, "segment": 3} == numbers(
        "reserved_bytes", "segment"
    )
    assert (0, 1) == (_count("num_alloc_retries"), _count("num_device_free"))
    del held


def test_oversize_blocks_are_not_split(sim, take, numbers):
    """From the largest size that is split on, a block is handed out whole or not."""
    sim.set_max_split_size(20 * MIB)
    take(40 * MIB)
    whole = take(21 * MIB)  # less than 20 MiB of it unused
    seen = numbers("allocated_bytes", "reserved_bytes")
    del whole
    small = take(19 * MIB)  # must not touch it

    assert {"allocated_bytes": 40 * MIB, "reserved_bytes": 40 * MIB} == seen
    assert {"allocated_bytes": 20 * MIB, "reserved_bytes": 60 * MIB} == numbers(
        "allocated_bytes", "reserved_bytes"
    )
    del small


@pytest.mark.parametrize("expandable", [False, True])
def test_any_order_of_allocations_is_kept_apart(sim, take, expandable):
    """500 random sizes, freed in any order, some refused: contents stay, none is lost.

    Each block holds a number of its own from end to end; where two shared a byte, one
    of them would show it.
    """
    draw = random.Random(0)
    sim.set_expandable_segments(expandable)
    sim.set_garbage_collection_threshold(0.8)
    sim.set_limit(60 * MIB)
    blocks, refused = [], 0
    for i in range(500):
        try:
            blocks.append((i % 251, take(2 ** draw.uniform(0, 24)).fill_(i % 251)))
        except torch.OutOfMemoryError:
            refused += 1
        while blocks and draw.random() < (0.45 if len(blocks) < 40 else 0.55):
            number, block = blocks.pop(draw.randrange(len(blocks)))
            assert number == int(block.min()) == int(block.max())
            del block
    held = sum(-(-block.numel() // 512) * 512 for _, block in blocks)

    assert 0 < refused == _count("num_ooms") < 100
    assert held <= sim.memory_allocated() <= held + len(blocks) * MIB
    assert sum(block.numel() for _, block in blocks) == (
        _count("requested_bytes.all.current")
    )
    blocks.clear()
    sim.empty_cache()
    left = {
        name: number
        for name, number in sim.memory_stats().items()
        if name.endswith(".current") and number
    }
    assert {} == left
