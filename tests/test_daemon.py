"""Sessions with the thread beside training, as users have them."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time

import pytest
import torch

import mimose
from mimose.worker.thread import NAME

pytestmark = pytest.mark.daemon

LENGTHS = [64, 20, 64, 30, 40, 50, 34, 44, 60, 28, 56, 38]


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture(autouse=True)
def _none_left():
    yield
    gc.collect()
    until = time.monotonic() + 10
    while _threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert _threads() == []


def _budget(toys, model, meter):
    ends = [toys.inputs(LENGTHS[0]), toys.inputs(LENGTHS[-1])]
    return toys.budget_between(model, ends, 0.6, meter)


def test_results_budget_and_phases_are_as_without(toys, meter):
    """To the last bit, under plans soon."""
    model = toys.chain(6)
    batches = [toys.inputs(n) for n in LENGTHS * 2]
    budget = _budget(toys, model, meter)
    found, session = toys.compare(model, batches, meter=meter, budget=budget)
    assert found == []
    assert {"plan"} == {r.phase for r in list(session.records)[len(LENGTHS) :]}
    assert 0 == session.summary().steps_over
    late = [r for r in session.records if r.phase == "plan"]
    assert any("recompute" in r.actions for r in late)
    assert any("keep" in r.actions for r in late)


def test_there_is_one_thread_a_session_and_none_without(toys, meter):
    """It begins with the first lesson, and ends with the session."""
    model = toys.chain(4)
    with mimose.attach(model, "1TiB", meter=meter):
        assert _threads() == []
        toys.train(model, [toys.inputs(8)])
        assert len(_threads()) == 1
    assert _threads() == []
    with mimose.attach(model, "1TiB", meter=meter, refine=False):
        toys.train(model, [toys.inputs(8)])
        assert _threads() == []


def test_a_failure_is_told_at_the_next_step_and_training_goes_on(toys, meter, caplog):
    """Learned inline from then on: plans come all the same."""
    model = toys.chain(4)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        toys.train(model, [toys.inputs(n) for n in LENGTHS[:2]])
        session._engine.learner._teach(lambda _: 1 / 0)
        session._engine.background.catch_up()
        assert _threads() == []
        with caplog.at_level(logging.WARNING, "mimose"):
            toys.train(model, [toys.inputs(n) for n in LENGTHS[2:]])
        assert "plan" == session.records[-1].phase
    said = [r.getMessage() for r in caplog.records if "thread" in r.getMessage()]
    assert len(said) == 1
    assert "ZeroDivisionError" in said[0]


def test_a_session_dropped_without_detach_leaves_nothing(toys, meter):
    """Nor does one whose step was cut off by an error."""
    for _ in range(3):
        model = toys.chain(4)
        session = mimose.attach(model, "1TiB", meter=meter)
        toys.train(model, [toys.inputs(8)])
        del session, model
    gc.collect()


def test_an_interrupt_leaves_nothing(toys, meter):
    """Ctrl-C in the midst of a step, the session a context."""
    model = toys.chain(4)

    def stop(*_):
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        mimose.attach(model, "1TiB", meter=meter),
    ):
        toys.train(model, [toys.inputs(8), toys.inputs(9)])
        model.register_forward_hook(stop)
        toys.train(model, [toys.inputs(8)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_trains_on(toys, meter):
    """With a thread of its own; the parent as well."""
    model = toys.chain(4)
    torch.set_num_threads(1)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        with torch.no_grad():  # autograd's own threads do not outlive a fork
            model(toys.inputs(8))
        for _ in range(3):
            session._engine.learner._teach(lambda taught: taught)
        child = os.fork()
        if child == 0:
            try:
                session._engine.learner._teach(lambda taught: taught)
                session._engine.background.catch_up()
                os._exit(0 if len(_threads()) == 1 else 1)
            except BaseException:
                os._exit(2)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        toys.train(model, [toys.inputs(8)])


def test_workers_of_a_loader_are_forked_beside_it(toys, meter):
    """And end; the session learns on."""
    model = toys.chain(4)
    loader = torch.utils.data.DataLoader(
        [torch.randn(n, 16) for n in LENGTHS], batch_size=None, num_workers=2
    )
    with mimose.attach(model, "1TiB", meter=meter) as session:
        for _ in range(2):
            for batch in loader:
                model(batch).sum().backward()
                model.zero_grad()
        assert "plan" == session.records[-1].phase


def test_no_step_of_a_known_context_waits(toys, meter, monkeypatch):
    """Whatever waits to be learned, a step goes on with what is known."""
    model = toys.chain(4)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        toys.train(model, [toys.inputs(n) for n in LENGTHS])
        assert "plan" == session.records[-1].phase
        goes_on = threading.Event()
        session._engine.learner._teach(lambda taught: goes_on.wait(20) and taught)
        toys.train(model, [toys.inputs(n) for n in (33, 47)])
        assert not goes_on.is_set()
        assert ["plan"] * 2 == [r.phase for r in list(session.records)[-2:]]
        goes_on.set()
        session._engine.background.catch_up()
