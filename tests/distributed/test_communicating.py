"""Units whose forward waits for other ranks are found, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_units_that_communicate(launch: Callable[..., Any]) -> None:
    """Each is named with what communicates in it; a unit's own group does not."""
    results = launch("sharding_cases:why_units_communicate", {"units": {}})
    parallel = "has parameters of tensor parallelism"
    expected = {
        "plain": "",
        "one group": "",
        "replicated groups": "",
        "under a root": "",
        "groups inside": "0 is a sharded group of its own (fully_shard), gathered in "
        "each call",
        "groups inside that stay": "",
        "synchronous norm": "1 is a SyncBatchNorm",
        "tensor parallel": f"0 {parallel}",
        "both": f"0 {parallel}",
        "wrapper": "0 is a DistributedDataParallel",
        "old wrapper": "it is a FullyShardedDataParallel",
    }
    assert results["units"] == [expected, expected]
