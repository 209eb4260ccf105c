"""A `BatchSampler` on several ranks: steps of like seconds, by all ranks' forecasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

_CASES: dict[str, Any] = {
    "tokens": {"do": "draw", "most_tokens": (512, 256)},
    "alike": {"do": "draw_unlike", "slow": (1.0, 1.02), "balance": True},
    "at random": {"do": "draw_unlike"},
    "other rows": {"do": "draw_unlike", "tokens": (2**12, 2**9), "balance": True},
    "looked": {"do": "look"},
    "left out": {"do": "leave_out", "n_samples": 100, "more": 150},
    "unlike": {"do": "draw_unlike", "slow": (1.0, 2.0), "balance": True},
    "workers": {"do": "train", "n_workers": (0, 2), "stop_at": 5},
    "other workers": {"do": "train", "n_workers": (3, 1), "stop_at": 0},
    "few samples": {"do": "train", "n_workers": (0, 8), "stop_at": 2, "n_samples": 60},
    "failing": {"do": "fail", "failing": 1},
    "apart": {"do": "begin_apart"},
}


@pytest.fixture(scope="module")
def told(launch: Callable[..., Any]) -> dict[str, Any]:
    """Return what the ranks tell of each case."""
    found: dict[str, Any] = launch("sampler_ranks:", _CASES, limit_seconds=120.0)
    return found


def _shares(told: Any) -> tuple[list[list[list[int]]], Any]:
    """Return the batches of each rank, and the lengths; each sample comes once."""
    shares, lengths = [mine[0] for mine in told], told[0][1]
    assert len(set(map(len, shares))) == 1
    drawn = [at for share in shares for batch in share for at in batch]
    assert sorted(set(drawn)) == list(range(len(lengths)))
    assert len(drawn) <= len(lengths) + 1  # one again for an equal number of batches
    return shares, lengths


def test_ranks_draw_by_the_smallest_forecast(told: dict[str, Any]) -> None:
    """One holds 512 tokens and the other 256: both draw 256, each sample once."""
    shares, lengths = _shares(told["tokens"])
    tokens = [len(b) * max(lengths[at] for at in b) for share in shares for b in share]
    assert 128 < max(tokens) <= 256


def _waits(told: Any) -> float:
    """Return the slower rank's seconds over the mean of both, when all is known."""
    steps = np.array([mine[3] for mine in told])[:, 1:]
    return float(steps.max(axis=0).sum() / steps.mean(axis=0).sum())


def test_batches_of_a_step_take_like_seconds(told: dict[str, Any]) -> None:
    """Ranks wait for nearly nothing; at random they wait a good part of the time."""
    for case in ("alike", "at random", "other rows", "unlike"):
        _shares(told[case])
    assert _waits(told["alike"]) < 1.02
    assert _waits(told["at random"]) > 1.15
    assert _waits(told["unlike"]) < 1.15  # 1.33 if it made no difference
    assert _waits(told["other rows"]) < 1.02  # half the rows make no rank slow


def test_a_look_on_one_rank_loses_nothing(told: dict[str, Any]) -> None:
    """Before there is a session nothing is exchanged."""
    _shares(told["looked"])


def test_full_batches_that_become_fewer_than_ranks(told: dict[str, Any]) -> None:
    """The epoch ends, and no sample comes twice."""
    drawn = [at for mine in told["left out"] for batch in mine[0] for at in batch]
    assert len(drawn) == len(set(drawn)) > 0


def test_steps_come_in_random_order(told: dict[str, Any]) -> None:
    """The seconds of a step say nothing of those of the next one."""
    slowest = np.array([mine[3] for mine in told["alike"]]).max(axis=0)
    ranks = slowest.argsort().argsort()
    assert len(slowest) > 30
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.3


def test_weights_make_the_mean_of_the_global_batch(told: dict[str, Any]) -> None:
    """The mean over ranks of weighted means is the mean over all."""
    shares, lengths = _shares(told["alike"])
    for step, batches in enumerate(zip(*shares, strict=True)):
        for kind, size in enumerate((np.ones(len(lengths)), np.array(lengths))):
            sums = [size[batch].sum() for batch in batches]
            weights = [mine[2][kind][step] for mine in told["alike"]]
            assert np.allclose(weights, 2 * np.array(sums) / sum(sums))


@pytest.mark.parametrize("case", ["workers", "other workers", "few samples"])
def test_ranks_have_other_numbers_of_workers(told: dict[str, Any], case: str) -> None:
    """Nobody waits forever, also after an epoch that was stopped."""
    for stopped, *_ in told[case]:
        assert len(stopped) == _CASES[case]["stop_at"]
    for epoch in (1, 2):
        drawn = [at for mine in told[case] for batch in mine[epoch] for at in batch]
        assert sorted(set(drawn)) == list(range(told[case][0][3]))


def test_an_error_on_one_is_an_error_on_all(told: dict[str, Any]) -> None:
    """The rank that fails has its own error, and the other one names it."""
    (other, text), (own, _) = told["failing"]
    assert (other, own) == ("OtherRankError", "ValueError")
    assert "nothing can be forecast here" in text


def test_ranks_in_other_epochs_are_an_error(told: dict[str, Any]) -> None:
    """Else they would draw samples twice, and others never."""
    for text in told["apart"]:
        assert "epoch 0" in text
        assert "epoch 1" in text


@pytest.mark.slow
def test_gradients_of_windows_over_ranks(launch: Callable[..., Any]) -> None:
    """They are those of one batch of all ranks' samples, over an epoch's end."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    cases = {
        f"{ignores} {is_stream}": {"ignores": ignores, "is_stream": is_stream}
        for ignores in (False, True)
        for is_stream in (False, True)
    }
    found = launch("filling_ranks:difference", cases, limit_seconds=120.0)
    for case in cases:
        (first, rows, n_steps), (second, others, _) = found[case]
        assert max(first, second) < 1e-10
        assert 12 == n_steps
        assert 36 == len(rows) == len(others)
        assert rows != others
        assert sum(rows) + sum(others) > 40  # more than an epoch
        assert (0 in rows + others) == cases[case]["is_stream"]  # one is repeated
