"""A `BatchSampler` on several ranks: as many batches, by the smallest forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_ranks_draw_by_the_smallest_forecast(launch: Callable[..., Any]) -> None:
    """One holds 512 tokens and the other 256: both draw 256, each sample once."""
    cases = {"tokens": {"most_tokens": (512, 256)}}
    told = launch("sampler_ranks:draw", cases, limit_seconds=120.0)["tokens"]
    shares, lengths = [batches for batches, _ in told], told[0][1]

    assert len(shares[0]) == len(shares[1])
    drawn = [at for share in shares for batch in share for at in batch]
    assert sorted(drawn) == list(range(len(lengths)))
    tokens = [len(b) * max(lengths[at] for at in b) for share in shares for b in share]
    assert 128 < max(tokens) <= 256


@pytest.mark.slow
def test_gradients_of_windows_over_ranks(launch: Callable[..., Any]) -> None:
    """They are those of one batch of all ranks' samples, over an epoch's end."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    cases = {str(ignores): {"ignores": ignores} for ignores in (False, True)}
    found = launch("filling_ranks:difference", cases, limit_seconds=120.0)
    for case in cases:
        (first, rows, n_steps), (second, others, _) = found[case]
        assert max(first, second) < 1e-10
        assert 12 == n_steps
        assert 36 == len(rows) == len(others)
        assert rows != others
        assert sum(rows) + sum(others) > 40  # more than an epoch
