"""What a step takes of the host, in functions called: a number that no load changes."""

import sys

import pytest

import mimose
from mimose.exactness.guard import State

pytest.importorskip("transformers")


def _calls(step):
    """Return how many functions a step calls, Python's and others."""
    n_calls = 0

    def note(_frame, event, _argument):
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return n_calls


@pytest.mark.parametrize("by_session", [False, True])
def test_a_kept_step_calls_few_more_functions_than_a_bare_one(toys, meter, by_session):
    """In the loop itself, and by `session.step`, which looks at the model besides."""
    model, batch = toys.zoo_model("bert"), toys.text_batches([16])[0]

    def step():
        model(**batch).loss.backward()
        model.zero_grad()

    step()
    bare = _calls(step)
    with mimose.attach(model, "1TiB", planner="none", meter=meter) as session:
        run = (lambda: session.step(step)) if by_session else step
        for _ in range(3):
            run()
        assert bare < _calls(run) < 1.25 * bare


def test_a_layer_that_nobody_changed_is_not_read_anew(toys, meter, monkeypatch):
    """Neither as its call begins nor as it is recomputed."""
    model, batch = toys.zoo_model("bert"), toys.text_batches([16])[0]
    made, init = [], State.__init__
    monkeypatch.setattr(
        State, "__init__", lambda self, *a: (made.append(self), init(self, *a))[1]
    )

    with mimose.attach(model, "1TiB", planner="full", meter=meter) as session:
        for _ in range(3):
            made.clear()
            model(**batch).loss.backward()
            model.zero_grad()
        assert {"recompute"} == {*session.records[-1].actions}
    assert [] == made
