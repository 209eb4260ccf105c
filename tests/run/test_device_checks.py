"""Settings of the device under which nothing can be planned, or no budget be kept."""

import inspect
import logging

import pytest
import torch

import mimose
from mimose.run.device_checks import DeviceChecks

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


def test_trials_of_algorithms_are_warned_of_once(caplog, benchmark):
    """Switched on before attach, it is said there, and not again."""
    benchmark(True)
    with caplog.at_level(logging.WARNING, logger="mimose"):
        checks = DeviceChecks(_Convolutions(), _CUDA)
        assert 1 == len(_warnings(caplog))
        checks.before_step()
    assert 1 == len(_warnings(caplog))
    assert "benchmark = False" in _warnings(caplog)[0]


def test_trials_switched_on_later_are_warned_of(caplog, benchmark):
    """Switched on behind attach, it is said at the next step."""
    benchmark(False)
    with caplog.at_level(logging.WARNING, logger="mimose"):
        checks = DeviceChecks(_Convolutions(), _CUDA)
        checks.before_step()
        assert [] == _warnings(caplog)
        benchmark(True)
        checks.before_step()
        checks.before_step()
    assert 1 == len(_warnings(caplog))


@pytest.mark.parametrize(
    ("model", "device"),
    [(torch.nn.Linear(2, 2), _CUDA), (_Convolutions(), torch.device("cpu"))],
)
def test_without_convolutions_or_cudnn_there_is_nothing_to_say(
    caplog, benchmark, model, device
):
    """The setting does nothing to other models, or on other devices."""
    benchmark(True)
    with caplog.at_level(logging.WARNING, logger="mimose"):
        DeviceChecks(model, device).before_step()
    assert [] == _warnings(caplog)


def test_capture_is_looked_for_on_cuda(monkeypatch):
    """A step under capture is refused, and the next one outside of it is not."""
    is_on = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_on[0])
    checks = DeviceChecks(torch.nn.Linear(2, 2), _CUDA)
    is_on[0] = True
    with pytest.raises(mimose.MimoseError, match=r"captured on cuda:0.*detach"):
        checks.before_step()
    is_on[0] = False
    checks.before_step()


def test_a_build_without_capture_has_nothing_to_ask(monkeypatch):
    """Some builds of torch name the function, and raise where it is called."""

    def dummy():
        msg = "Tried to instantiate dummy base class"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", dummy)
    DeviceChecks(torch.nn.Linear(2, 2), _CUDA).before_step()


def test_a_step_on_the_cpu_asks_no_device():
    """There is no capture to look for there."""
    assert (
        DeviceChecks(torch.nn.Linear(2, 2), torch.device("cpu"))._is_capturing is None
    )


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


def test_torch_still_replaces_forward_by_that_name():
    """The name above is that of a function inside torch's."""
    source = inspect.getsource(torch.cuda.make_graphed_callables)
    assert "def make_graphed_callables(" in source
    assert "func.forward = make_graphed_forward(" in source
    assert "def new_fwd(" in source


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
