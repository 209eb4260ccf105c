"""What is learned from steps, and the planning problems that are filled from it."""

import numpy as np
import pytest

import mimose
from mimose.collector import KEEP, RECOMPUTE
from mimose.estimator import Pattern, SizeRule, actions_by_unit
from mimose.planners import peak_bytes


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lambda h, w: 7, True),
        (lambda h, w: w, True),
        (lambda h, w: -(-h // 4), True),
        (lambda h, w: h * w, True),
        (lambda h, w: (h * 37 + w * 11) % 23, False),
    ],
)
def test_rules_of_own_sizes(rule, found):
    """Constants, copies, halvings and products are found; chance is owned up to."""
    rng = np.random.default_rng(0)
    roots = [tuple(int(v) for v in rng.integers(16, 200, 2)) for _ in range(20)]
    learned = SizeRule(roots[:14], [rule(*root) for root in roots[:14]])
    assert found == learned.is_found
    if found:
        assert [rule(*r) for r in roots[14:]] == [learned(r) for r in roots[14:]]


def test_actions_are_sorted_by_unit_and_call():
    """Each unit gets its calls' actions; calls that are no events are recomputed."""
    events = (("a#0", 0, 0, 5), ("b#1", 1, 1, 5), ("a#2", 0, 2, 5))
    pattern = Pattern(events, calls=(3, 2))
    assert ((KEEP, RECOMPUTE, RECOMPUTE), (RECOMPUTE, KEEP)) == actions_by_unit(
        pattern, (KEEP, KEEP, RECOMPUTE)
    )


def _trained(toys, meter, model, batches, **options):
    """Train under a session and hand it out, still attached."""
    session = mimose.attach(model, "1TiB", meter=meter, **options)
    toys.train(model, batches)
    return session


def test_the_problem_of_a_measured_shape(toys, meter):
    """Held bytes, costs and names of a chain are those that can be counted by hand."""
    model = toys.chain(3)
    with _trained(toys, meter, model, [toys.inputs(64)] * 3) as session:
        problem = session.planning_problem()
    assert ("blocks.0#0", "blocks.1#0", "blocks.2#0") == problem.events
    assert (KEEP, RECOMPUTE) == problem.actions
    n_rows, width, floats = 64, 16, 4
    output = n_rows * width * floats
    # tanh's result, dropout's mask, and the output; recomputed: the output
    kept = 2 * output + output + output
    assert [[kept, output]] * 3 == problem.held_bytes.tolist()
    product = 2 * n_rows * width * 2 * width
    assert [[0.0, 2.0 * product]] * 3 == problem.cost.tolist()
    assert problem.allowed.all()
    assert 2**40 == problem.budget_bytes


def test_the_problem_of_a_shape_never_seen(toys, meter):
    """What was learned at some shapes gives the exact held bytes of another."""
    model = toys.zoo_model("bert")
    batches = toys.text_batches([20, 33, 9, 26, 14, 38, 30, 12])
    with _trained(toys, meter, model, batches) as session:
        predicted = session.planning_problem({"attention_mask.1": 29})
    other = toys.zoo_model("bert")
    with _trained(toys, meter, other, toys.text_batches([29, 29])) as session:
        measured = session.planning_problem()
    np.testing.assert_allclose(
        predicted.held_bytes, measured.held_bytes, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit", "resnet"])
def test_the_timeline_tells_the_peak_of_any_plan(toys, meter, name):
    """From steps that recompute all, the growth under mixed plans is told to 2%."""
    model = toys.zoo_model(name)
    (batch,) = toys.zoo_batches(name, 1)
    n_events = 6 if name == "resnet" else 4 if name == "t5" else 3
    rng = np.random.default_rng(4)
    for _ in range(3):
        choice = rng.permutation([0, 1, *rng.integers(0, 2, n_events - 2)])
        planner = toys.FixedActions(*choice.tolist())
        with toys.untracked():
            twin = toys.copy.deepcopy(model)
        with _trained(toys, meter, twin, [batch] * 5, planner=planner) as session:
            last = session.records[-1]
            problem = session.planning_problem(start_bytes=0)
        assert "plan" == last.phase
        predicted = float(peak_bytes(problem, choice.astype(np.intp)))
        assert last.observed_growth_bytes == pytest.approx(predicted, rel=0.02)


def test_kept_units_may_not_be_recomputed(toys, meter):
    """A unit that was found to be unrecomputable has one action left."""
    model = toys.chain(3)
    with _trained(toys, meter, model, [toys.inputs()] * 3) as session:
        session._driver.keep_always(session._units[1], "for the test")
        problem = session.planning_problem()
    assert [[True, True], [True, False], [True, True]] == problem.allowed.tolist()


def test_forgetting_a_context_collects_again(toys, meter):
    """After `forget` a context is measured anew before it is planned."""
    model = toys.chain(3)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        toys.train(model, [toys.inputs()] * 6)
        assert "plan" == session.records[-1].phase
        facts, _ = session._driver.last_facts()
        session._policy.forget(facts.context)
        toys.train(model, [toys.inputs()])
        assert "collect" == session.records[-1].phase
