"""What was learned, saved and loaded."""

import copy
import json

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


def test_a_state_with_seconds_loads(toys, meter, learned):
    """Sessions of before learned what actions take; that is left out."""
    model, state = learned
    timed = copy.deepcopy(state)
    timed["cost_model"]["seconds"] = [["a", "lean", [4], [0.0, 8.0, False, True], [1]]]
    with mimose.attach(model, "1GiB", meter=meter) as resumed:
        resumed.load_state_dict(timed)
        assert state == _round_trip(resumed.state_dict())


def test_the_same_as_if_it_had_gone_on(toys, meter):
    """What was loaded predicts exactly as what was saved."""
    model, session = _trained(toys, meter)
    resumed = mimose.attach(model, "1GiB", meter=meter)
    resumed.load_state_dict(_round_trip(session.state_dict()))
    again = _round_trip(resumed.state_dict())
    assert _round_trip(session.state_dict()) == again
    resumed.detach()


def test_state_of_several_contexts(toys, meter):
    """Accumulated and unpadded batches, several sizes: everything is kept apart."""
    model = toys.zoo_model("t5")
    batches = toys.zoo_batches("t5", 24)
    _, session = toys.compare(model, batches, meter=meter)
    state = _round_trip(session.state_dict())
    with mimose.attach(model, "1GiB", meter=meter) as resumed:
        resumed.load_state_dict(state)
        records = _train(toys, model, batches[-4:], resumed)
    assert {"plan"} == {record.phase for record in records}


def test_unrecomputable_layers_stay_kept(toys, meter):
    """A layer that was found to be beyond recomputation is not tried again."""
    model, session = _trained(toys, meter)
    session._engine.findings.kept["bert.encoder.layer.1"] = "it was so"
    session._engine.learner.restrict(1, ["keep"])
    with mimose.attach(model, "1GiB", meter=meter) as resumed:
        resumed.load_state_dict(_round_trip(session.state_dict()))
        assert {"bert.encoder.layer.1": "it was so"} == resumed.summary().kept_units
        (record,) = _train(toys, model, toys.text_batches([22]), resumed)
    assert "keep" == record.actions[1]


def test_another_model_is_refused(toys, meter):
    """The message names what differs."""
    _, session = _trained(toys, meter)
    state = session.state_dict()
    with (
        mimose.attach(toys.zoo_model("gpt2"), "1GiB", meter=meter) as other,
        pytest.raises(
            StateMismatchError, match=r"another model: '.*' there, '.*' here"
        ),
    ):
        other.load_state_dict(state)


def test_another_depth_is_refused(toys, meter, learned):
    """Where the class is the same, units and parameters are compared."""
    _, state = learned
    state["of"]["units"].append("bert.encoder.layer.3")
    with (
        mimose.attach(toys.zoo_model("bert"), "1GiB", meter=meter) as other,
        pytest.raises(StateMismatchError, match=r"units: 3: 'bert\.encoder\.layer\.3'"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("version", 1, "another version: 1 there, 4 here"),
        ("device", "cuda: NVIDIA H100", "another device: 'cuda: NVIDIA H100' there"),
        ("settings", {"torch": "1.0"}, "another settings: torch: '1.0' there"),
        ("parameters", {"w": "(1,) torch.half"}, "another parameters: .* 'missing'"),
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


def test_another_predictor_is_refused(toys, meter):
    """Samples are the same, but a setting was changed: it says which."""
    model, session = _trained(toys, meter)
    with (
        mimose.attach(model, "1GiB", meter=meter, predictor="tree") as other,
        pytest.raises(StateMismatchError, match="predictor: 'polynomial' there"),
    ):
        other.load_state_dict(session.state_dict())


@pytest.mark.parametrize("nonsense", [None, 3, [], {}, {"of": None}, {"of": {}}])
def test_nonsense_is_refused(toys, meter, nonsense):
    """Whatever is not a state is refused as such."""
    with (
        mimose.attach(toys.chain(2), "1GiB", meter=meter) as session,
        pytest.raises(StateMismatchError, match="not a state"),
    ):
        session.load_state_dict(nonsense)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("policy"),
        lambda state: state["cost_model"].pop("series"),
        lambda state: state["cost_model"]["series"].append("text"),
        lambda state: state["cost_model"].update(patterns=[]),
        lambda state: state["policy"]["bound"].update(residuals=["text"]),
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


def test_a_model_with_other_settings_learns_anew(toys, meter, learned):
    """What no name and no shape tells is in the contexts: nothing of it is used."""
    _, state = learned
    other = toys.zoo_model("bert")
    for layer in other.bert.encoder.layer:
        layer.attention.self.is_causal = not layer.attention.self.is_causal
    with mimose.attach(other, "1GiB", meter=meter) as resumed:
        resumed.load_state_dict(state)
        (record,) = _train(toys, other, toys.text_batches([22]), resumed)
    assert "collect" == record.phase


def test_layers_found_to_be_unrepeatable_stay_so_after_loading(toys, meter, learned):
    """A state from before they were found does not make them recomputable again."""
    _, state = learned
    with mimose.attach(toys.zoo_model("bert"), "1GiB", meter=meter) as resumed:
        resumed._engine.findings.keep(resumed._engine.units[2], "it was so")
        resumed.load_state_dict(state)
        assert ["bert.encoder.layer.2"] == list(resumed.summary().kept_units)
        assert resumed._engine.units[2].is_kept
