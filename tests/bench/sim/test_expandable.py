"""Expandable segments: one range a pool that grows by granules."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.sim

MIB = 2**20


@pytest.fixture(autouse=True)
def _expandable(_sim_as_new, sim):
    sim.set_expandable_segments(True)


@pytest.mark.parametrize(("n_bytes", "granule"), [(1, 2 * MIB), (3 * MIB, 20 * MIB)])
def test_granules_of_the_two_pools(take, numbers, n_bytes, granule):
    """2 MiB are mapped for a small block, 20 MiB for a large one; no segment counts."""
    block = take(n_bytes)

    assert {"reserved_bytes": granule, "segment": 0, "inactive_split": 0} == numbers(
        "reserved_bytes", "segment", "inactive_split"
    )
    del block


def test_a_free_end_grows(sim, take):
    """18 MiB begin in the 17 that are free at the end, and one granule is added."""
    blocks = [take(3 * MIB), take(18 * MIB)]

    assert blocks[0].data_ptr() + 3 * MIB == blocks[1].data_ptr()
    assert 40 * MIB == sim.memory_reserved()


def test_growing_sizes_use_the_same_memory(sim, take):
    """30, 31, 32 MiB one after the other: 62 MiB in usual segments, 40 in this."""
    reserved = []
    for expandable in (False, True):
        sim.empty_cache()
        sim.set_expandable_segments(expandable)
        for size in (30, 31, 32):
            take(size * MIB)
        reserved.append(sim.memory_reserved())

    assert [62 * MIB, 40 * MIB] == reserved


def test_free_granules_are_unmapped(sim, take):
    """Of 30 free MiB before 30 that are held, the granule that both share stays."""
    freed, held = take(30 * MIB), take(30 * MIB)
    place = freed.data_ptr()
    sim.record_memory_history()
    del freed
    sim.empty_cache()
    reserved = sim.memory_reserved()
    del held
    sim.empty_cache()

    assert 40 * MIB == reserved
    assert 0 == sim.memory_reserved()
    unmapped = [each for each in sim.memory_history() if each.kind == "segment_unmap"]
    assert [
        ("segment_unmap", place, 20 * MIB),
        ("segment_unmap", place + 20 * MIB, 40 * MIB),
    ] == unmapped


def test_a_gap_is_filled_before_the_end_grows(sim, take):
    """25 MiB fit where 20 were unmapped and 10 are free."""
    freed, held = take(30 * MIB), take(30 * MIB)
    place = freed.data_ptr()
    del freed
    sim.empty_cache()
    block = take(25 * MIB)

    assert place == block.data_ptr()
    assert 60 * MIB == sim.memory_reserved()
    del held


def test_out_of_memory_unmaps_and_tries_again(sim, take):
    """Beside 60 cached MiB the small pool gets 2 only when they are unmapped."""
    sim.set_total_memory(60 * MIB)
    take(50 * MIB)
    block = take(1)

    assert 2 * MIB == sim.memory_reserved()
    assert 1 == sim.memory_stats()["num_alloc_retries"]
    del block
