"""Which walks need not be carried on, against a look at each pair."""

import math

import numpy as np
import pytest

from mimose.planners.dominance import Walks, beaten, undominated


def is_no_worse(walks, i, j, shared_bytes):
    """Whether a walk is at least as good as another, whatever follows."""
    saved = (0, 0) if walks.saved is None else walks.saved[[i, j]]
    later = walks.held[i] + shared_bytes * saved[0]
    return (
        walks.held[i] <= walks.held[j]
        and later <= walks.held[j] + shared_bytes * saved[1]
        and walks.cost[i] <= walks.cost[j]
    )


@pytest.mark.parametrize("shared_bytes", [0.0, 2.0, 9.0])
@pytest.mark.parametrize("pairs", [False, True])
def test_nothing_that_is_needed_goes(rng, pairs, shared_bytes):
    """Whatever is left out, one that is no worse stays, and nothing else does."""
    n_stay = n_needed = 0
    for _ in range(50):
        held, cost = 12 * rng.random((2, 30))
        cost[rng.random(30) < 0.1] = math.inf
        walks = Walks(held, cost, None, rng.random(30) < 0.5 if pairs else None)
        stay = undominated(walks, 0.0, shared_bytes).tolist()
        assert (np.diff(held[stay]) >= 0).all()
        assert np.isfinite(cost[stay]).all()
        assert len(set(stay)) == len(stay)
        for j in np.isfinite(cost).nonzero()[0]:
            assert any(is_no_worse(walks, i, j, shared_bytes) for i in stay)
        n_stay += len(stay)
        n_needed += sum(
            not any(is_no_worse(walks, i, j, shared_bytes) for i in stay if i != j)
            for j in stay
        )
    assert n_needed == n_stay


def test_a_level_that_matters_is_no_match():
    """A walk whose level matters leaves the dearer one in; others may match it."""
    held, cost = np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0, 7.0])
    walks = Walks(held, cost, np.array([9.0, 0.0, 9.0]))
    assert [0, 1] == undominated(walks, 4.0, 0.0).tolist()


def test_one_that_has_saved_beats_none_that_has_not():
    """Of walks whose level matters, equal in all else."""
    same = np.ones(2)
    for saved, expected in (
        ([True, False], [False, False]),
        ([False, True], [False, True]),
    ):
        walks = Walks(same, same, 9 * same, np.array(saved))
        assert expected == beaten(walks, 4.0).tolist()
