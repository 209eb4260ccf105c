"""Steps that end early leave nothing on the host: the next finds its room."""

import gc

import pytest
import torch

import mimose
from mimose.actions.offload.copies import PlainCopies

pytestmark = pytest.mark.sim
ROW = 512 * 128 * 4
N_ROWS = {"offload": 9, "offload_input": 3}
"""What a step of three blocks sends to the host."""


def _fail(*_):
    msg = "told to fail"
    raise OSError(msg)


def _no_backward(model, x, patch):
    model(x)


def _forward(model, x, patch):
    patch.setattr(model.blocks[2].dropout, "forward", _fail)
    with pytest.raises(OSError, match="told to fail"):
        model(x)


def _backward(model, x, patch):
    hook = model.blocks[1].down.bias.register_hook(_fail)
    with pytest.raises(OSError, match="told to fail"):
        model(x).backward()
    hook.remove()


def _copy_out(model, x, patch):
    patch.setattr(PlainCopies, "to_host", _fail)
    with pytest.raises(OSError, match="told to fail"):
        model(x).backward()


def _copy_back(model, x, patch):
    patch.setattr(PlainCopies, "to_device", _fail)
    with pytest.raises(OSError, match="told to fail"):
        model(x).backward()


@pytest.mark.parametrize("action", N_ROWS)
@pytest.mark.parametrize(
    "end", [_no_backward, _forward, _backward, _copy_out, _copy_back]
)
def test_the_next_step_finds_its_room(toys, sim, monkeypatch, action, end):
    """No tensor is refused by a host that has room for one step alone."""
    del sim
    model = toys.chain(3, width=128).to("sim")
    x = toys.inputs(512, width=128).to("sim")
    options = {"actions": ("keep", action, "recompute"), "planner": toys.Always(action)}
    budget = N_ROWS[action] * ROW
    with mimose.attach(model, "1GiB", host_budget=budget, **options) as session:
        for _ in range(2):
            model(x).backward()
        with monkeypatch.context() as patch:
            end(model, x, patch)
        torch.zeros(1, requires_grad=True).sum().backward()  # empties torch's queue
        gc.collect()
        model.zero_grad()
        model(x).backward()
        host = session.summary().host
    assert (host.peak_bytes, host.n_refused) == (budget, 0)
