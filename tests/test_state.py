"""What was learned, saved and loaded."""

import copy
import json
import random

import pytest
import torch

import mimose
from mimose.exceptions import StateMismatchError

LENGTHS = [20, 33, 9, 26, 14, 38, 30, 12, 23, 17, 35, 28]
LATER = [21, 36, 18, 29, 37, 24]


def _trained(toys, meter, name="bert", lengths=LENGTHS):
    """Train a while; return the model and what its session says."""
    model = toys.zoo_model(name)
    _, session = toys.compare(model, toys.text_batches(lengths), meter=meter)
    return model, session


def _round_trip(state):
    return json.loads(json.dumps(state))


@pytest.fixture(scope="module")
def _learned(toys):
    with toys.counting() as counting:
        model, session = _trained(toys, counting)
    return model, _round_trip(session.state_dict())


@pytest.fixture
def learned(_learned):
    """A model, and a copy of what a session has learned of it."""
    return copy.deepcopy(_learned)


def _train(toys, model, batches, session):
    toys.train(model, batches)
    return list(session.records)


def test_a_resumed_session_plans_from_its_first_step(toys, meter):
    """After loading there is nothing to collect, and the predictions hold."""
    model, session = _trained(toys, meter)
    state = _round_trip(session.state_dict())
    batches = toys.text_batches(LATER)
    budget = toys.budget_between(model, batches, 0.5, meter)
    with mimose.attach(model, budget, meter=meter) as resumed:
        resumed.load_state_dict(state)
        records = _train(toys, model, batches, resumed)
    assert [] == [(r.phase, r.reason) for r in records if r.phase != "plan"]
    assert any("recompute" in r.actions and "keep" in r.actions for r in records)
    for record in records:
        assert record.observed_peak_bytes <= budget
        assert record.observed_growth_bytes == pytest.approx(
            record.predicted_growth_bytes, rel=0.03
        )


def test_it_goes_into_a_checkpoint(toys, meter, tmp_path):
    """`torch.load` takes it under `weights_only`, and gives back what JSON would."""
    model, session = _trained(toys, meter)
    state = session.state_dict()
    torch.save({"model": model.state_dict(), "session": state}, tmp_path / "it.pt")
    saved = torch.load(tmp_path / "it.pt", weights_only=True)["session"]
    assert _round_trip(state) == saved
    assert state["cost_model"]["patterns"]
    with mimose.attach(model, "1GiB", meter=meter) as resumed:
        resumed.load_state_dict(saved)
        assert state == resumed.state_dict()


@pytest.mark.parametrize(
    ("name", "said"), [("gpt2", "model: '.*' there"), ("bert", r"encoder\.layer\.3")]
)
def test_another_model_is_refused(toys, meter, learned, name, said):
    """The message names what differs: the class, or the layers."""
    _, state = learned
    state["of"]["layers"].append("bert.encoder.layer.3")
    with (
        mimose.attach(toys.zoo_model(name), "1GiB", meter=meter) as other,
        pytest.raises(StateMismatchError, match=said),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("version", 1, "version: 1 there"),
        ("settings", {"torch": "1.0"}, "torch: '1.0' there"),
        ("parameters", {"w": "(1,) torch.half"}, "'missing'"),
    ],
)
def test_other_settings_are_refused(toys, meter, learned, part, value, message):
    """Version, device, settings and weights have to be the same."""
    model, state = learned
    state["of"][part] = value
    with (
        mimose.attach(model, "1GiB", meter=meter) as other,
        pytest.raises(StateMismatchError, match=message),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("nonsense", [None, {"of": {}}])
def test_nonsense_is_refused(toys, meter, nonsense):
    """Whatever is not a state is refused as such."""
    with (
        mimose.attach(toys.chain(2), "1GiB", meter=meter) as session,
        pytest.raises(StateMismatchError, match="not one that"),
    ):
        session.load_state_dict(nonsense)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("policy"),
        lambda state: state["cost_model"]["series"].append("text"),
        lambda state: state.update(sizes={"key": {}}),
    ],
)
def test_damaged_state_changes_nothing(toys, meter, learned, damage):
    """A state that breaks off half-way leaves the session as it was."""
    model, good = learned
    bad = copy.deepcopy(good)
    damage(bad)
    with mimose.attach(model, "1GiB", meter=meter) as other:
        other.load_state_dict(good)
        before = _round_trip(other.state_dict())
        with pytest.raises(StateMismatchError, match="damaged"):
            other.load_state_dict(bad)
        assert before == _round_trip(other.state_dict())


class _Draws(torch.nn.Module):
    """Cannot be run again: it draws from Python's generator."""

    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x) * random.random()


def test_layers_that_cannot_be_recomputed_stay_kept(toys, meter):
    """Those that a state names, and those found since it was saved."""

    def attached():
        model = toys.chain(3)
        model.blocks[1] = _Draws(16)
        return model, mimose.attach(model, "1TiB", layers="blocks", meter=meter)

    model, session = attached()
    with session:
        early = _round_trip(session.state_dict())
        toys.train(model, [toys.inputs()] * 3)
        late, kept = _round_trip(session.state_dict()), session.summary().kept_units
        session.load_state_dict(early)
        assert ["blocks.1"] == list(kept)
        assert kept == session.summary().kept_units
    model, resumed = attached()
    with resumed:
        resumed.load_state_dict(late)
        assert kept == resumed.summary().kept_units
        (record,) = _train(toys, model, [toys.inputs()], resumed)
    assert ("keep", 0) == (record.actions[1], record.retries)
