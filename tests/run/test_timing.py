"""What plans add, timed call by call: what it teaches, and what records say of it."""

import gc
import json

import pytest

import mimose
from mimose.learn.learner import Learner
from mimose.run import timing
from mimose.types import EventSeconds

ACTIONS = "keep", "lean", "recompute"


@pytest.fixture
def taught(monkeypatch):
    """What learners are told of each step, and whether it was measured."""
    return _noting(monkeypatch)


def _noting(monkeypatch):
    told, absorb = [], Learner.absorb_seconds

    def noted(self, facts, events, *, is_measured=False):
        told.append((dict(events), is_measured))
        absorb(self, facts, events, is_measured=is_measured)

    monkeypatch.setattr(Learner, "absorb_seconds", noted)
    return told


def _priced(monkeypatch, seconds):
    """Let each call take so long, by its action, and a forward like recomputing it."""
    read, forward = timing.Timing.read, seconds["recompute"]

    def priced(self):
        times = read(self)
        if times is None:
            return None
        events = {
            call: event._replace(seconds=EventSeconds(seconds[event.action], forward))
            for call, event in times.events.items()
        }
        total = sum(seconds[event.action] for event in events.values())
        return timing.StepTimes(events, total)

    monkeypatch.setattr(timing.Timing, "read", priced)


def _trained(toys, meter, share=0.75, n_times=4, **how):
    """Train at a budget that needs plans; return the session."""
    model = toys.chain(6, width=128)
    batches = [toys.inputs(2 * n, width=128) for n in (24, 40, 56, 64, 72, 80, 96)]
    budget = toys.budget_between(model, batches[-2:], share, meter)
    with mimose.attach(model, budget, meter=meter, **how) as session:
        toys.train(model, batches * n_times)
    del model
    gc.collect()  # else the next session may see it go
    return session


@pytest.fixture(scope="module")
def timed(toys):
    """A session that was timed, and what learners were told; only to be read."""
    with pytest.MonkeyPatch.context() as patched, toys.counting() as meter:
        told = _noting(patched)
        return _trained(toys, meter, actions=ACTIONS, refine=False), told


@pytest.fixture(scope="module")
def lean_is_dear(toys):
    """A session in which that takes longest; only to be read."""
    with pytest.MonkeyPatch.context() as patched, toys.counting() as meter:
        _priced(patched, {"lean": 9.0, "recompute": 1.0})
        return _trained(toys, meter, actions=ACTIONS, refine=False)


def _planned(session):
    return [r for r in session.records if r.phase == "plan" and not r.reason]


def test_plans_follow_what_was_timed(toys, meter, monkeypatch, lean_is_dear):
    """An action that turns out far too dear is in no plan any more."""
    _priced(monkeypatch, {"lean": 0.001, "recompute": 9.0})
    lean_is_cheap = _trained(toys, meter, actions=ACTIONS)
    for session, never in ((lean_is_dear, "lean"), (lean_is_cheap, "recompute")):
        actions = {action for r in _planned(session)[-7:] for action in r.actions}
        assert {"keep", "lean", "recompute"} - {never} == actions
        assert not any(record.is_over for record in session.records)


def test_flops_stay_where_they_are_asked_for(toys, meter, monkeypatch):
    """What is timed changes no plan then, and is predicted all the same."""
    plans = []
    for seconds in ({"lean": 9.0, "recompute": 1.0}, {"lean": 1.0, "recompute": 9.0}):
        with monkeypatch.context() as patched:
            _priced(patched, seconds)
            how = {"actions": ACTIONS, "cost": "flops"}
            session = _trained(toys, meter, n_times=3, **how)
        plans.append([record.actions for record in session.records])
        predicted = [record.predicted_extra_seconds for record in _planned(session)]
        assert max(filter(None, predicted)) >= min(seconds.values())
    assert plans[0] == plans[1]


def test_two_actions_are_planned_by_flops(toys, meter, monkeypatch):
    """By default; equal runs make equal plans then."""
    _priced(monkeypatch, {"recompute": 1.0})
    session = _trained(toys, meter, n_times=2)
    assert not session._engine.learner.model.plans_by_seconds
    other = _trained(toys, meter, n_times=2, cost="seconds")
    assert other._engine.learner.model.plans_by_seconds


def test_records_tell_seconds(timed):
    """None where a step was measured; else what was added, 0 where all is kept."""
    session, _ = timed
    for record in session.records:
        if record.phase in ("collect", "step_down") or record.reason:
            assert record.extra_seconds is None
    told = [r for r in _planned(session) if r.extra_seconds is not None]
    assert len(told) >= 10
    for record in told:
        assert bool(record.n_recomputed) == (record.extra_seconds > 0.0)
        assert bool(record.n_recomputed) == (record.predicted_extra_seconds > 0.0)
    assert "added time" in session.report()
    assert "adds ms" in session.report(width=120)
    assert "adds ms" in session.explain()
    assert session.summary().extra_seconds == sum(r.extra_seconds for r in told)


def test_measured_steps_teach_what_they_do_not_slow(timed):
    """Only what is rebuilt tensor by tensor, and none of the forwards."""
    session, taught = timed
    measured = [events for events, is_measured in taught if is_measured]
    ordinary = [events for events, is_measured in taught if not is_measured]
    assert {"lean"} == {e.action for events in measured for e in events.values()}
    known = {e.action for events in ordinary for e in events.values()}
    assert known >= {"lean"}
    assert "keep" not in known
    assert session._engine.learner.model.seconds is not None


def test_making_a_recipe_teaches_nothing(toys, meter, taught):
    """Nor do the calls in which it is tried: the first two of each unit."""
    model, batch = toys.chain(2, width=128), toys.inputs(64, width=128)
    with mimose.attach(
        model, "1TiB", meter=meter, actions=ACTIONS, planner=toys.FixedActions(1, 1)
    ) as session:
        toys.train(model, [toys.inputs(n, width=128) for n in range(40, 56)])
        toys.train(model, [batch] * 4)
    ran = [r for r in session.records if "lean" in r.actions]
    assert ran
    first_told = next(i for i, (events, _) in enumerate(taught) if events)
    assert first_told >= 2


def test_times_travel_with_the_state(toys, meter, lean_is_dear):
    """A session that loads them has the same seconds; a state without them loads."""
    session = lean_is_dear
    state = json.loads(json.dumps(session.state_dict()))
    how = {"meter": meter, "actions": ACTIONS}
    again = mimose.attach(toys.chain(6, width=128), "1TiB", **how)
    again.load_state_dict(state)
    assert state["cost_model"]["seconds"]
    assert again._engine.learner.model.seconds == session._engine.learner.model.seconds
    del state["cost_model"]["seconds"]
    again.load_state_dict(state)
    assert again._engine.learner.model.seconds is None
    again.detach()


def test_an_unknown_cost_is_refused(toys):
    """The message says what there is."""
    with pytest.raises(ValueError, match="'auto', 'seconds' or 'flops', got 'euros'"):
        mimose.attach(toys.chain(2), "1TiB", cost="euros")


def test_a_device_without_events_is_not_timed(monkeypatch):
    """Then nothing is told, and costs stay FLOPs."""
    import torch

    class Nothing:
        def __init__(self, **_):
            msg = "no events here"
            raise RuntimeError(msg)

    monkeypatch.setattr(timing.torch, "Event", Nothing, raising=False)
    clock = timing.Clock(torch.device("mps"))
    assert clock.timing(0).is_off
    assert clock.timing(0).read() is None
