"""Backwards, and those that never come, of layers that hold something on the host."""

import copy
import gc

import pytest
import torch
from torch import nn

import mimose
from mimose.run.actions.offload.copies import PlainCopies

pytestmark = [
    pytest.mark.sim,
    pytest.mark.parametrize("action", ["offload", "offload_input"]),
]
ROW = 512 * 128 * 4


class Stack(nn.Module):
    """A stem and blocks whose last output is returned; with dropout.

    Args:
        blocks: Of a chain.
    """

    def __init__(self, chain):
        super().__init__()
        self.stem, self.blocks = chain.stem, chain.blocks

    def forward(self, x):
        """Map (rows, width) to the same."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model(toys):
    """Three blocks on the simulated accelerator."""
    return Stack(toys.chain(3, width=128)).to("sim")


@pytest.fixture
def x(toys):
    """An input of 512 rows."""
    return toys.inputs(512, width=128).to("sim")


@pytest.fixture
def under(toys, model, action):
    """A session whose layers all run under the action, and that knows them already."""
    options = {"actions": ("keep", action, "recompute"), "host_budget": 64 * ROW}
    planner = toys.Always(action)
    with mimose.attach(model, "1GiB", planner=planner, **options) as session:
        yield session


def _known(model, x):
    """Run two steps, in which the layers tell what they do."""
    for _ in range(2):
        model(x).square().mean().backward()
    model.zero_grad()


def _held(session):
    gc.collect()
    return session._engine.host_memory.held_bytes


def _settle():
    """Have torch let go of what a failed backward left in its queue."""
    torch.zeros(1, requires_grad=True).sum().backward()


def _gradients(model):
    return [parameter.grad.cpu() for parameter in model.parameters()]


def _same(run, model, under, x):
    """Whether a loop leaves the gradients that it leaves bare, and nothing else."""
    bare = copy.deepcopy(under._model)
    for module in bare.modules():
        vars(module).pop("forward", None)
    _known(model, x)
    bare.zero_grad()
    for each in (bare, model):
        torch.manual_seed(3)
        run(each)
    assert not under.summary().kept_units
    pairs = zip(_gradients(bare), _gradients(model), strict=True)
    return all(torch.equal(one, other) for one, other in pairs) and not _held(under)


def test_two_backwards_of_a_retained_graph(model, under, x):
    """Both find everything."""

    def run(model):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    assert _same(run, model, under, x)


def test_a_part_and_then_the_rest(model, under, x):
    """A backward that goes through the last layer alone takes nothing from the next."""

    def run(model):
        loss = model(x).square().mean()
        last = list(model.blocks[-1].parameters())
        torch.autograd.grad(loss, last, retain_graph=True)
        loss.backward()

    assert _same(run, model, under, x)


def test_a_gradient_of_a_gradient(model, under, x):
    """With a graph of the gradients, such as a penalty on them."""

    def run(model):
        given = x.clone().requires_grad_()
        loss = model(given).square().mean()
        (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
        (loss + gradient.square().sum()).backward()

    assert _same(run, model, under, x)


def test_under_autocast(model, under, x):
    """Inputs in half precision come back in half."""

    def run(model):
        with torch.autocast("sim", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    assert _same(run, model, under, x)


def test_a_graph_without_a_backward(model, under, x):
    """Its memory goes with it."""
    _known(model, x)
    loss = model(x).square().mean()
    assert _held(under) > 0
    del loss
    assert 0 == _held(under)


def test_a_forward_that_fails(model, under, x):
    """What was sent to the host before goes with it."""
    _known(model, x)
    model.blocks[2].dropout = None
    with pytest.raises(TypeError):
        model(x)
    assert 0 == _held(under)


def test_a_backward_that_fails(model, under, x):
    """What was to come back goes with the graph."""
    _known(model, x)

    def fail(_):
        msg = "the backward fails"
        raise RuntimeError(msg)

    hook = model.blocks[1].down.bias.register_hook(fail)
    loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match="the backward fails"):
        loss.backward()
    hook.remove()
    del loss
    _settle()
    assert 0 == _held(under)
    model.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_a_copy_that_fails(model, under, x, monkeypatch, way):
    """Its error is the step's, and the next step is an ordinary one."""
    _known(model, x)

    def fail(*_):
        msg = "the copy fails"
        raise OSError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(PlainCopies, way, fail)
        with pytest.raises(OSError, match="the copy fails"):
            model(x).square().mean().backward()
    _settle()
    assert 0 == _held(under)
    model.zero_grad()
    model(x).square().mean().backward()
    assert 0 == _held(under)
