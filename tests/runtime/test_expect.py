"""`Session.expect`: the largest shape to come, looked at before it comes."""

import logging

import pytest

import mimose

WIDTH = 64
LENGTHS = (64, 200, 90, 150, 120, 77, 180, 101)


def _run(toys, session, model, lengths=LENGTHS):
    for n_rows in lengths:
        toys.forward(model, toys.inputs(n_rows, WIDTH)).backward()
        model.zero_grad()


def _attach(toys, meter, n_rows, **options):
    """Attach within what a step of so many rows needs with everything recomputed."""
    model = toys.chain(6, WIDTH)
    with mimose.attach(model, "1TiB", planner="full", meter=meter) as session:
        held = meter.live_bytes()
        _run(toys, session, model, [n_rows] * 2)
    needed = session.peak_bytes - held
    session = mimose.attach(model, f"+{needed}B", meter=meter, **options)
    return model, session


def test_a_budget_that_cannot_hold_is_an_error_at_the_start(toys):
    """Before that batch comes, in a step of a shape that fits; with the numbers."""
    with toys.counting() as meter:
        model, session = _attach(toys, meter, 210)
        session.expect({"x.0": n_rows} for n_rows in (30, 248, 100))
        with pytest.raises(mimose.InfeasibleBudgetError, match=r"x\.0 = 248") as error:
            _run(toys, session, model)
        assert 3 <= len(session.records) < len(LENGTHS)
        assert error.value.least_peak_bytes > error.value.budget_bytes
        session.detach()


def test_or_a_warning_and_training_goes_on(toys, caplog):
    """Under on_infeasible="warn", once."""
    with toys.counting() as meter:
        model, session = _attach(toys, meter, 210, on_infeasible="warn")
        session.expect([{"x.0": 248}])
        with caplog.at_level(logging.WARNING, logger="mimose"):
            _run(toys, session, model)
        assert 1 == sum("x.0 = 248" in r.getMessage() for r in caplog.records)
        assert len(LENGTHS) == len(session.records)
        session.detach()


def test_shapes_that_fit_are_told_and_no_error(toys):
    """What the largest takes is known once predictions reach so far."""
    with toys.counting() as meter:
        model, session = _attach(toys, meter, 240)
        assert session.summary().largest_to_come is None
        session.expect({"x.0": n_rows} for n_rows in (30, 210, 100))
        assert {"x.0": 210} == session.summary().largest_to_come
        assert session.summary().least_peak_to_come is None
        _run(toys, session, model)
        least = session.summary().least_peak_to_come
        assert least is not None
        assert least <= session.budget
        assert "x.0=210 is the largest" in session.report(width=200)
        session.detach()


def test_what_is_no_shape_is_refused(toys):
    """One mapping in place of several, other things, and sizes that are none."""
    session = mimose.attach(toys.chain(2, WIDTH), "1TiB")
    with pytest.raises(TypeError, match="map names to sizes"):
        session.expect({"x.0": 3})
    with pytest.raises(TypeError, match="map names to sizes"):
        session.expect([3])
    for size in (0, 1.5, True, "3"):
        with pytest.raises(ValueError, match=r"x\.0 must be an integer"):
            session.expect([{"x.0": size}])
    session.detach()
