"""What a session says of steps to come, against what they then take."""

import copy
import json

import numpy as np
import pytest
import torch

import mimose
from mimose.state import sealed

LENGTHS = [20, 48, 33, 27, 41, 64, 52, 36, 24, 58, 44, 30, 61, 39, 25, 50]


def _train(toys, model, lengths):
    """Train a model whose optimizer lives as long as it does."""
    if not hasattr(model, "optimizer"):
        model.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = (toys.inputs(n) for n in lengths)
    toys.train(model, batches, optimizer=model.optimizer)


@pytest.fixture
def session(toys, meter):
    """A session that plans, within a budget that the longest do not fit untouched."""
    model = toys.chain(6)
    ends = [toys.inputs(64), toys.inputs(58)]
    budget = toys.budget_between(model, ends, 0.6, meter)
    with mimose.attach(model, budget, meter=meter) as session:
        _train(toys, model, LENGTHS)
        yield session


def test_a_step_does_what_was_forecast(toys, session):
    """The plan and the peak are those of the step, and asking has changed nothing."""
    for length in (57, 35, 63):
        state = json.dumps(session.state_dict())
        misses = session.summary().cache_misses
        forecast = session.forecast({"x.0": length})
        assert forecast == session.forecast({"x.0": np.int64(length)})
        assert (state, misses) == (
            json.dumps(session.state_dict()),
            session.summary().cache_misses,
        )
        _train(toys, session._model, [length])
        record = session.records[-1]
        assert forecast.fits
        assert forecast.shape == record.shape
        assert forecast.plan.actions == record.actions
        own = toys.inputs(length).nbytes  # is there as the step begins
        missing = record.predicted_peak_bytes - forecast.peak_bytes
        assert missing == pytest.approx(own, abs=1e-3 * session.budget)


def test_what_does_not_fit_or_is_not_known_says_why(session):
    """A budget that is too small has numbers; a size out of reach is named."""
    assert session.forecast({"x.0": 64}).fits
    small = session.forecast({"x.0": 64}, budget=session.budget // 3)
    assert (False, None) == (small.fits, small.plan)
    assert small.peak_bytes > small.budget_bytes
    assert "margin" in small.why_not
    far = session.forecast({"x.0": 6400})
    assert (None, None, None) == (far.fits, far.plan, far.peak_bytes)
    assert "6400" in far.why_not
    assert 99.0 == far.extrapolation


@pytest.mark.parametrize("share", [0.5, 0.6, 0.75, 2.0])
def test_the_largest_is_the_last_that_fits(session, share):
    """One more does not fit, or is not known."""
    budget = int(share * session.budget)
    most = session.largest({}, dim="x.0", budget=budget)
    assert session.forecast({"x.0": most}, budget).fits
    assert not session.forecast({"x.0": most + 1}, budget).fits
    assert most // 2 == session.largest({}, dim="x.0", budget=budget, limit=most // 2)
    assert 0 == session.largest({}, dim="x.0", budget=session.budget // 10)
    with pytest.raises(ValueError, match="'64'"):
        session.largest({}, dim="x.0", limit="64")


def test_a_loaded_state_is_asked_before_the_first_step(toys, session, meter):
    """Nothing was run, and the optimizer's state, which is to come, is counted."""
    model = copy.deepcopy(session._model)
    with mimose.attach(model, session.budget, meter=meter) as other:
        with pytest.raises(mimose.MimoseError, match="no step was run yet"):
            other.forecast({"x.0": 50})
        state = session.state_dict()
        state["start_bytes"] += 5000
        other.load_state_dict(sealed(state))
        forecast = other.forecast({"x.0": 50}, budget="1GiB")
        assert forecast.fits
        assert 0 < other.largest({}, dim="x.0") <= session.largest({}, dim="x.0")
        _train(toys, model, [50])
        record = other.records[-1]
        missing = forecast.peak_bytes - record.predicted_peak_bytes
        assert missing >= 5000


def test_a_step_that_finds_gradients_starts_with_them(toys, session):
    """What the first of an accumulation makes, the next ones begin with."""
    own = sum(p.nbytes for p in session._model.parameters())
    budget = 2 * session.budget
    first = session.forecast({"x.0": 40}, budget)
    later = session.forecast({"x.0": 40}, budget, accumulating=True)
    more = later.peak_bytes - first.peak_bytes
    assert more == pytest.approx(own, abs=1e-3 * budget)


def test_what_cannot_be_asked_is_refused(session):
    """Names that the model has not are told with those that it has."""
    for ask in (
        lambda: session.forecast({"y.0": 3}),
        lambda: session.largest({"x.0": 3}, dim="y.0"),
    ):
        with pytest.raises(mimose.MimoseError, match=r"x\.0"):
            ask()
