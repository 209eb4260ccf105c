"""A `BatchStream` on two ranks: unequal streams, like seconds, errors, a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

_CASES: dict[str, Any] = {
    "even": {"do": "draw", "of_ranks": (700, 250)},
    "early": {"do": "draw", "of_ranks": (20, 400), "has_session": False},
    "stop": {"do": "draw", "of_ranks": (700, 250), "even_batches": False},
    "alike": {"do": "draw", "of_ranks": (3000, 3000), "buffer": 400},
    "resume": {"do": "resume", "of_ranks": (500, 700), "stop_at": 40},
    "resume dry": {"do": "resume", "of_ranks": (60, 700), "stop_at": 70},
    "failing": {"do": "fail", "of_ranks": (700, 700), "fails_at": 300},
    "empty": {"do": "fail", "of_ranks": (0, 700)},
    "unopened": {"do": "fail", "of_ranks": (700, 700), "fails_at": -1},
}


@pytest.fixture(scope="module")
def told(launch: Callable[..., Any]) -> dict[str, Any]:
    """Return what the ranks tell of each case."""
    found: dict[str, Any] = launch("stream_ranks:", _CASES, limit_seconds=120.0)
    return found


@pytest.mark.parametrize("case", ["even", "early", "alike"])
def test_all_end_together(told: dict[str, Any], case: str) -> None:
    """Each sample comes once; a rank that has no more repeats one, and says so."""
    assert len(told[case][0]) == len(told[case][1])
    for n, drawn in zip(_CASES[case]["of_ranks"], told[case], strict=True):
        new = [numbers for numbers, _, is_repeated in drawn if not is_repeated]
        assert list(range(n)) == sorted(number for batch in new for number in batch)
        again = [numbers for numbers, _, is_repeated in drawn if is_repeated]
        assert all(len(numbers) == 1 for numbers in again)
        assert again == [drawn[len(new) - 1][0][:1]] * len(again) or n == 3000


def test_all_stop_with_the_first(told: dict[str, Any]) -> None:
    """With `even_batches=False`: the shorter stream comes once, nothing is repeated."""
    longer, shorter = told["stop"]
    assert len(longer) == len(shorter)
    for drawn in (longer, shorter):
        numbers = [number for batch, _, _ in drawn for number in batch]
        assert len(set(numbers)) == len(numbers)
        assert not any(is_repeated for _, _, is_repeated in drawn)
    assert sorted(n for batch, _, _ in shorter for n in batch) == list(range(250))


def test_batches_of_a_step_take_like_seconds(told: dict[str, Any]) -> None:
    """The slower rank takes hardly more than the mean."""
    taken = np.array([[s for _, s, _ in drawn[20:200]] for drawn in told["alike"]])
    assert taken.max(axis=0).sum() < 1.1 * taken.mean(axis=0).sum()


@pytest.mark.parametrize("case", ["resume", "resume dry"])
def test_ranks_go_on_where_they_were(told: dict[str, Any], case: str) -> None:
    """Each by its state: nothing is lost, and only a dry rank repeats a sample."""
    assert len(told[case][0]) == len(told[case][1]) > _CASES[case]["stop_at"]
    for n, batches in zip(_CASES[case]["of_ranks"], told[case], strict=True):
        new = [numbers for numbers, is_repeated in batches if not is_repeated]
        assert list(range(n)) == sorted(number for batch in new for number in batch)
        assert len(new) == len(batches) or n < 700


def test_an_error_on_one_is_an_error_on_all(told: dict[str, Any]) -> None:
    """At the same batch, with the text of the rank that failed."""
    (n, other, text), (n_own, own, _) = told["failing"]
    assert n == n_own > 0
    assert (other, own) == ("OtherRankError", "OSError")
    assert "sample 300 cannot be read" in text
    (_, own, text), (n, other, _) = told["empty"]
    assert (n, own, other) == (0, "MimoseError", "OtherRankError")
    assert "got no sample" in text
    (n, other, _), (_, own, text) = told["unopened"]
    assert (n, other, own) == (0, "OtherRankError", "OSError")
    assert "sample -1 cannot be read" in text


@pytest.mark.slow
def test_the_trainer_goes_on_with_all_streams(launch: Callable[..., Any]) -> None:
    """From its checkpoint; a step in which a rank only repeats leaves no NaN."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = launch("filling_ranks:resumed", {"": {}}, limit_seconds=120.0)[""]
    assert all(is_finite for _, is_finite in found)
    assert list(range(9)) == sorted(n for trained, _ in found for n in trained)
    assert 5 == len(found[0][0])
