"""Made-up problems of the whole menu have the proportions they are to have."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.menus import MENUS, draw_whole_menu, with_budgets, with_menu
from benchmarks.problems import KINDS
from mimose.planners import safest_plan
from mimose.planners.prefix import prefix_form


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_events", [1, 2, 5, 12])
def test_the_whole_menu(rng, kind, n_events):
    """There are twelve actions; the codecs hold less than lean, and let inputs go."""
    problem = draw_whole_menu(rng, kind, n_events, pairs=True, nets_by_action=False)
    at = {name: i for i, name in enumerate(problem.actions)}
    assert (n_events, 12) == problem.cost.shape
    assert problem.lossy == {"pool", "pool4", "quantize", "quantize4"}
    less = problem.input_bytes[:, None] * problem.releases_input
    held = (problem.held_bytes - less).T
    for name in (*problem.lossy, "offload"):
        assert (held[at[name]] < held[at["lean"]]).all()
    assert (held[at["offload_input"]] < held[at["recompute"]]).all()
    needs_host = problem.host_bytes.any(axis=0).nonzero()[0].tolist()
    assert [at["offload"], at["offload_input"]] == needs_host


@pytest.mark.parametrize("pairs", [False, True])
def test_pairs_where_they_were_asked_for(rng, pairs):
    """Elsewhere nobody saves an output, and nothing depends on a pair."""
    form = prefix_form(draw_whole_menu(rng, "stages", 8, pairs=pairs))
    assert pairs == form.has_pairs


def test_each_menu_has_all_of_the_one_before(rng):
    """From whole layers to everything, keeping first and recomputing last."""
    problem = draw_whole_menu(rng, "layers", 4, pairs=True)
    menus = [with_menu(problem, menu).actions for menu in MENUS]
    assert menus[0] == ("keep", "recompute")
    assert menus[-1] == problem.actions
    assert all(set(less) < set(more) for less, more in pairwise(menus))


def test_budgets(rng):
    """A share of 0 is the least peak of the menu, under the host's budget."""
    problem = draw_whole_menu(rng, "layers", 8, pairs=True)
    problem = with_budgets(problem, "offload", 0.0, 0.2)
    least = safest_plan(with_menu(problem, "offload")).peak_bytes
    assert least == problem.budget_bytes
    assert problem.host_budget_bytes == pytest.approx(
        0.2 * problem.host_bytes.max(axis=1).sum()
    )
