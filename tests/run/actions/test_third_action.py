"""A made-up third action, from collecting to the state that is saved."""

import json

import pytest
import torch

import mimose
from mimose.planners import ActionSpec
from mimose.record_file import read_records
from mimose.report.page import write_page
from mimose.run.actions.recompute import Recompute
from mimose.run.actions.registry import choose, forget, register


class _Twin(torch.autograd.Function):
    """Passes a tensor on, and holds a copy of it until its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (_,) = ctx.saved_tensors
        return gradient


class _Twinned(Recompute):
    """Recomputes, and holds its output twice."""

    spec = ActionSpec(name="twin", code="t", resources=frozenset({"compute"}))

    def run(self, call, probe):
        return _Twin.apply(super().run(call, probe))

    def held_bytes(self, counted):
        return 2.0 * counted.output_bytes


@pytest.fixture
def twin():
    """The action, registered as long as the test runs."""
    action = _Twinned()
    register(action)
    yield action
    forget(action)


def test_a_third_action_goes_all_the_way(toys, meter, twin, tmp_path):
    """It is collected, learned, planned, run, recorded, told of and saved."""
    lengths = (8, 24, 16, 12, 20, 32, 28, 10)
    batches = [toys.inputs(64 * n) for n in lengths * 4]
    plain = toys.train(toys.chain(4), batches)
    model = toys.chain(4)
    budget = toys.budget_between(model, batches, 0.5, meter)
    path = tmp_path / "steps.jsonl"
    options = {"meter": meter, "actions": ("keep", "twin", "recompute")}
    with mimose.attach(model, budget, record_to=path, **options) as session:
        trained = toys.train(model, batches)
        problem = session.planning_problem()
        state = json.loads(json.dumps(session.state_dict()))
        report = session.report()
    records = list(session.records)
    used = {action for record in records for action in record.actions}
    errors = [
        abs(record.prediction_error)
        for record in records
        if record.phase == "plan"
        and "twin" in record.actions
        and record.prediction_error is not None  # else it was tried
    ]
    assert [] == toys.differences(plain, trained)
    assert ("keep", "twin", "recompute") == problem.actions
    assert {"keep", "twin", "recompute"} >= used >= {"twin", "recompute"}
    assert errors
    assert max(errors[-3:]) < 0.01
    assert not any(record.is_over for record in records)
    assert report
    assert records == read_records(path)
    write_page(records, tmp_path / "page.html")
    assert "twin" in (tmp_path / "page.html").read_text()
    again = toys.chain(4)
    with mimose.attach(again, budget, **options) as resumed:
        resumed.load_state_dict(state)
        toys.train(again, batches[:4])
        assert "plan" == resumed.records[0].phase


def test_a_state_of_another_menu_is_refused(toys, meter, twin):
    """What was learned of two actions does not plan for three."""
    with mimose.attach(toys.chain(2), "1TiB", meter=meter) as session:
        state = session.state_dict()
    with (
        mimose.attach(
            toys.chain(2), "1TiB", meter=meter, actions=("keep", "recompute")
        ) as other,
        pytest.raises(
            mimose.StateMismatchError, match="actions: 'keep, twin, recompute' there"
        ),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("actions", [(), ("keep",), ("keep", "fold"), "fold", None])
def test_actions_that_cannot_be_chosen(actions):
    """Keeping and the least are always there, and names are known."""
    with pytest.raises(ValueError, match="must be 'exact', 'fine', 'all', or 'keep'"):
        choose(actions)


def test_no_actions_at_all(toys):
    """None is none of what may be given, and nothing else is said of it."""
    with pytest.raises(ValueError, match=r"must be 'exact', .* got None"):
        mimose.attach(toys.chain(2), "1TiB", actions=None)
