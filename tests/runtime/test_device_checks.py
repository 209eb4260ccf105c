"""Settings of the device under which nothing can be planned, or no budget be kept."""

import logging

import pytest
import torch

import mimose
from mimose.runtime.device_checks import DeviceChecks

_CUDA = torch.device("cuda:0")


class _Convolutions(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(1, 1, 3), torch.nn.ReLU())


def _warnings(caplog):
    return [r.message for r in caplog.records if "cudnn.benchmark" in r.message]


@pytest.fixture
def benchmark(monkeypatch):
    """Hand out a switch for cuDNN's trials of algorithms, off again behind the test."""
    before = torch.backends.cudnn.benchmark
    yield lambda is_on: setattr(torch.backends.cudnn, "benchmark", is_on)
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("is_late", [False, True])
def test_trials_of_algorithms_are_warned_of_once(caplog, benchmark, is_late):
    """Where they are switched on, before attach or behind it, and not again."""
    benchmark(not is_late)
    with caplog.at_level(logging.WARNING, logger="mimose"):
        checks = DeviceChecks(_Convolutions(), _CUDA)
        assert len(_warnings(caplog)) == (not is_late)
        benchmark(True)
        checks.before_step()
        checks.before_step()
        DeviceChecks(torch.nn.Linear(2, 2), _CUDA)  # without convolutions
    assert 1 == len(_warnings(caplog))
    assert "benchmark = False" in _warnings(caplog)[0]


def test_a_graphed_model_is_refused(toys):
    """A forward that replays a graph holds all of its memory, planned or not."""
    model = toys.chain(3)

    def new_fwd(*args):
        return args

    new_fwd.__qualname__ = (
        "make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"
    )
    model.blocks[1].forward = new_fwd
    message = r"forward of blocks\.1 \(Block\) is a CUDA graph"
    with pytest.raises(mimose.MimoseError, match=message):
        mimose.attach(model, "1TiB")
    assert new_fwd is model.blocks[1].forward


@pytest.mark.sim
def test_a_captured_step_leaves_nothing_behind(toys, sim, monkeypatch):
    """It makes no record and moves nothing; the step behind it runs as ever."""
    model = toys.chain(3).to("sim")
    inputs = toys.inputs().to("sim")
    is_on = [False]
    monkeypatch.setattr(
        sim, "is_current_stream_capturing", lambda: is_on[0], raising=False
    )
    with mimose.attach(model, "1GiB") as session:
        model(inputs)  # no backward: autograd sees no device that is added late
        is_on[0] = True
        state = torch.get_rng_state()
        with pytest.raises(mimose.MimoseError, match="graph is being captured on sim"):
            model(inputs)
        assert torch.equal(state, torch.get_rng_state())
        with torch.no_grad():
            model(inputs)  # evaluation is no step
        is_on[0] = False
        model(inputs)
        assert [0, 1] == [record.step for record in session.records]
    assert not toys.leftovers(model)
