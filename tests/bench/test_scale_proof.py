"""What many ranks wait for: formulas of exchanges, and steps of unlike batches."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.problems import draw_problem
from benchmarks.proofs import scale
from benchmarks.proofs.scale_balance import (
    Costs,
    accumulated,
    agreed,
    at_length,
    longest_first,
    make_costs,
    policies,
    rounded,
    sorted_within,
    static,
    step_seconds,
)
from benchmarks.proofs.scale_network import (
    NETWORKS,
    Network,
    all_reduce_seconds,
    measured_seconds,
)
from mimose.bench.rows import read
from mimose.run.agreement import vector_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"

TWO = Costs(
    plain=np.array([1.0, 2.0, 4.0]),
    actions=np.array([[0, 0], [0, 1], [1, 0]]),
    menu=np.array([[[0, 1.0]] * 2, [[0, 2.0]] * 2, [[0, 4.0]] * 2]),
)
"""Two events and actions, three lengths; longer batches recompute another event."""


@pytest.fixture(scope="module")
def costs():
    """Return what batches of a drawn problem's lengths take."""
    problem = draw_problem(np.random.default_rng(0), "layers", 6)
    return make_costs(problem, 0.3)


def test_a_ring_sends_to_every_rank_twice():
    """Its latency grows with the ranks, its bytes do not."""
    ring = Network("made up", "ring", 0.5, 1.0, 1.0, 100.0)
    assert all_reduce_seconds(ring, 2, 100) == pytest.approx(0.5 + 2 + 1)
    assert all_reduce_seconds(ring, 4, 100) == pytest.approx(0.5 + 6 + 1.5)
    assert 0.0 == all_reduce_seconds(ring, 1, 100)


def test_a_tree_goes_up_and_down():
    """Its latency grows with the logarithm, on a machine and between machines."""
    tree = Network("made up", "tree", 0.5, 1.0, 10.0, math.inf)
    assert all_reduce_seconds(tree, 8, 100) == pytest.approx(0.5 + 6)
    assert all_reduce_seconds(tree, 64, 100) == pytest.approx(0.5 + 6 + 60)


@pytest.mark.parametrize("network", NETWORKS)
def test_more_ranks_wait_longer(network):
    """On each network, and for more bytes as well."""
    seconds = [all_reduce_seconds(network, n, 632) for n in (2, 8, 64, 1024)]
    assert sorted(set(seconds)) == seconds
    assert all_reduce_seconds(network, 8, 10**6) > seconds[1]


@pytest.mark.parametrize(("n_layers", "n_words"), [(24, 311), (100, 1007)])
def test_the_vector_is_what_ranks_send(n_layers, n_words):
    """A head, two words a layer, and one a call of a layer, with some to spare."""
    assert 8 * n_words == vector_bytes(n_layers)


def test_gloo_processes_exchange():
    """So many rounds but the first tenth, each of which took time."""
    found = measured_seconds(2, vector_bytes(4), 50)
    assert 45 == len(found)
    assert min(found) > 0


def test_lengths_are_rounded_up():
    """To eight tokens."""
    assert [1, 1, 2, 64] == rounded(np.array([1, 8, 9, 512])).tolist()


def test_weights_do_not_grow_with_the_length():
    """Activations do; and seconds by more, for attention's part."""
    problem = draw_problem(np.random.default_rng(1), "layers", 4)
    half = at_length(problem, 0.5)
    assert np.allclose(problem.held_bytes, 2 * half.held_bytes)
    assert np.array_equal(problem.backward_net_bytes, half.backward_net_bytes)
    assert (problem.cost[:, 1:] > 2 * half.cost[:, 1:]).all()
    assert np.allclose(problem.cost, at_length(problem, 1.0).cost)


def test_longer_batches_take_longer(costs):
    """Plain and planned; only the long ones recompute."""
    assert (np.diff(costs.planned[1:]) > 0).all()
    assert (costs.planned >= costs.plain).all()
    assert costs.planned[8] == costs.plain[8]
    assert costs.planned[-1] > costs.plain[-1]


def test_who_agrees_recomputes_what_any_rank_does():
    """Unlike plans add up: the longest rank runs what its own plan did not."""
    lengths = np.array([[0, 0], [1, 1], [1, 2]])
    expected = [[1, 1], [2 + 2, 2 + 2], [2 + 4, 4 + 8]]
    assert expected == agreed(TWO, lengths).tolist()
    assert [[1, 1], [4, 4], [4, 8]] == TWO.planned[lengths].tolist()


def test_a_static_plan_is_the_longest_ones():
    """At every length."""
    assert [[1 + 1, 2 + 2, 4 + 4]] == static(TWO, np.array([[0, 1, 2]])).tolist()


def test_sorting_keeps_batches_and_makes_steps_alike():
    """Within its window; what is left over stays out."""
    seconds = np.array([[1.0, 8.0], [7.0, 2.0], [9.0, 3.0]])
    dealt = sorted_within(2)(seconds)
    assert [[1.0, 2.0], [7.0, 8.0]] == dealt.tolist()
    assert 5.0 == step_seconds(dealt)


def test_the_longest_batches_are_dealt_first():
    """To whoever has least so far; nobody gets more than others."""
    seconds = np.array([[[8.0, 7.0], [2.0, 1.0]]])
    assert [[9.0, 9.0]] == longest_first(seconds, seconds).tolist()
    alone = np.array([[[9.0, 1.0], [1.0, 1.0]]])
    assert [[10.0, 2.0]] == longest_first(alone, alone).tolist()


def test_what_balances_never_hurts_here(costs):
    """Planning by rank is no slower than agreeing; sorting and dealing help."""
    lengths = np.random.default_rng(0).integers(2, 64, (16, 8, 4))
    single = policies(costs, lengths[:, :, 0], (4, 16))
    assert single["ample memory"] <= single["by rank"] <= single["agreed"]
    assert single["by rank"] <= single["one static plan"]
    assert single["by rank, sorted over 16"] <= single["by rank, sorted over 4"]
    assert single["by rank, sorted over 4"] < single["by rank"]
    several = accumulated(costs, lengths)
    assert several["by predicted time"] < several["as they come"]


def test_equal_seeds_make_equal_rows(monkeypatch):
    """Nothing is measured in what is simulated."""
    monkeypatch.setattr(scale, "RANKS", (8,))
    monkeypatch.setattr(scale, "_SHARES", (0.3,))
    monkeypatch.setattr(scale, "_WINDOWS", (2, 4))
    first, again = (list(scale._simulated(1, 8)) for _ in range(2))
    assert first == again
    assert first != list(scale._simulated(2, 8))
    assert 2 * (6 + 3) == len(first)


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_the_rows_of_the_documentation_hold_together():
    """All parts are there, of what ranks send; by rank is no slower than agreed."""
    rows = read(DOCS / "results" / "cpu" / "scale.csv", scale.ScaleRow)
    parts = {"agreement", "learning", "measured", "one batch", "accumulated"}
    assert parts == {row.part for row in rows}
    sent = {row.n_bytes for row in rows if row.part in ("agreement", "measured")}
    assert {vector_bytes(24)} == sent
    steps = [row for row in rows if row.part == "one batch"]
    for row in steps:
        if row.policy == "by rank":
            assert scale._ratio(steps, row, "agreed") <= 1.0
            assert scale._ratio(steps, row, "one static plan") <= 1.0
