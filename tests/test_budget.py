"""Reading budgets as people write them."""

import numpy as np
import pytest

import mimose
from mimose import BudgetError
from mimose.budget import parse_budget, rank_share


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("6GiB", 6 * 2**30),
        (" 1.5 gb ", 15 * 10**8),
        ("2097152", 2**21),
        (123456, 123456),
        (0.5, 500),
        (" 12.5 % ", 125),
        ("+1MiB", 2**20 + 64),
        (np.int64(4096), 4096),
        (np.float32(0.5), 500),
    ],
)
def test_budgets_come_to_bytes(budget, expected):
    """Text, integers, fractions of the device and what is beyond now: whole bytes."""
    assert expected == parse_budget(budget, 1000, lambda: 64)


@pytest.mark.parametrize(
    "budget",
    [*["", "6GX", "-6GiB", "0GiB", "101%", "+5%"], *[0, 1.5, None, True, float("nan")]],
)
def test_budgets_that_mean_nothing_are_refused(budget):
    """An error echoes what was given."""
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget, 1000)
    assert repr(budget) in str(caught.value)


@pytest.mark.parametrize("budget", ["80%", 0.8])
def test_a_fraction_needs_a_total(budget):
    """The error echoes what was given, as it was given."""
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget, None)
    assert repr(budget) in str(caught.value)


@pytest.mark.parametrize(("n_ranks", "share"), [("4", 250), ("1", 1000), ("0", 1000)])
def test_ranks_of_a_host_share_its_memory(monkeypatch, n_ranks, share):
    """Each has an equal part of it; what is unknown stays so."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", n_ranks)
    assert share == rank_share(1000)
    assert rank_share(None) is None


def test_no_budget_on_a_cpu_is_an_error_with_numbers(toys):
    """What is there, and what to write."""
    with pytest.raises(BudgetError, match=r"GiB in all.*'6GiB'"):
        mimose.attach(toys.chain(2))


@pytest.mark.sim
@pytest.mark.parametrize(("total", "left"), [(80, 2.4), (8, 0.5)])
def test_no_budget_on_an_accelerator_is_what_is_there(sim, toys, total, left):
    """Less what libraries take beside the allocator; another's memory is not there."""
    sim.set_total_memory(total * 2**30)
    model = toys.chain(2).to("sim")
    with mimose.attach(model) as session:
        assert session.budget == int((total - left) * 2**30)
    sim.set_total_memory(400 * 2**20)
    with pytest.raises(BudgetError, match="another process"):
        mimose.attach(model)
