"""What the optimizer's steps tell: state, working memory, and whose they are."""

import gc
import os

import pytest
import torch

import mimose
from mimose.run.optimizer_watch import OptimizerWatch


@pytest.fixture
def watched(toys, meter):
    """Hand out a model under watch, its parameters with gradients."""
    model = toys.chain(2)
    watch = OptimizerWatch(model, meter)
    watch.start()
    _set_gradients(model)
    yield model, watch
    watch.remove()


def _set_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def test_the_state_of_adam_is_twice_the_parameters(watched):
    """After its first step AdamW holds two moments and a count for each."""
    model, watch = watched
    optimizer = torch.optim.AdamW(model.parameters())
    assert (0, False) == (watch.state_bytes, watch.has_stepped)
    optimizer.step()
    n_counts = len(list(model.parameters()))
    assert 2 * _bytes(model) + 4 * n_counts == watch.state_bytes
    assert watch.has_stepped


def test_plain_descent_has_no_state(watched):
    """SGD without momentum holds nothing."""
    model, watch = watched
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert (0, True) == (watch.state_bytes, watch.has_stepped)


def test_two_optimizers_add_up(watched):
    """Where parameters are split among optimizers, their states add up."""
    model, watch = watched
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        for part in (model.stem, model.blocks)
    ]
    for optimizer in optimizers:
        optimizer.step()
    assert _bytes(model) == watch.state_bytes


def test_the_working_memory_of_a_step(watched):
    """What a step takes beyond its state is measured from the second step on."""
    model, watch = watched
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer.step()
    assert 0.0 == watch.excess_bytes
    optimizer.step()
    assert _bytes(model) <= watch.excess_bytes <= 4 * _bytes(model)
    assert watch.peak_bytes >= watch.excess_bytes


def test_other_models_optimizers_are_not_counted(watched, toys):
    """A step of somebody else's parameters is none of ours."""
    _, watch = watched
    other = toys.chain(2)
    _set_gradients(other)
    torch.optim.AdamW(other.parameters()).step()
    assert (0, False) == (watch.state_bytes, watch.has_stepped)


def test_nothing_is_seen_after_removal(watched):
    """Once removed, a watch hears of no step; removing twice is harmless."""
    model, watch = watched
    watch.remove()
    watch.remove()
    torch.optim.AdamW(model.parameters()).step()
    assert not watch.has_stepped


def test_a_step_inside_a_backward_is_not_watched(toys, meter):
    """Its peak is the backward's, and the reading in progress is left alone."""
    model = toys.chain(2)
    watch = OptimizerWatch(model, meter)
    watch.start()
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def step(_):
        meter.extra_bytes = 10**6
        before = meter.peak_bytes()
        optimizer.step()
        seen.append(meter.peak_bytes() >= before)

    model.blocks[0].up.weight.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(toys.inputs()).sum().backward()
    watch.remove()
    assert [True] * 3 == seen
    assert (0.0, False) == (watch.excess_bytes, watch.has_stepped)


def test_a_closure_that_runs_the_model_is_no_working_memory(toys, meter):
    """What a closure's forward holds is not the optimizer's."""
    forwards = []
    model = toys.chain(2)
    watch = OptimizerWatch(model, meter, lambda: len(forwards))
    watch.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        forwards.append(1)
        loss = model(toys.inputs()).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    watch.remove()
    assert watch.has_stepped
    assert 0.0 == watch.excess_bytes


def test_attaching_again_and_again_opens_no_files(toys):
    """A session that was detached and dropped holds nothing open."""
    model = toys.chain(2)
    mimose.attach(model, "1TiB").detach()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a count)
    for _ in range(10):
        mimose.attach(model, "1TiB").detach()
    gc.collect()
    assert before == len(os.listdir("/proc/self/fd"))  # noqa: PTH208
