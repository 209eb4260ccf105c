"""What the optimizer's steps tell: state, working memory, and whose they are."""

import pytest
import torch

from mimose.optimizer_watch import OptimizerWatch


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
