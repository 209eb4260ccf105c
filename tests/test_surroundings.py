"""Weights and modes that change between a forward and its backward."""

import copy

import pytest
import torch

import mimose


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def _attach(model, planner="full"):
    return mimose.attach(model, "1TiB", planner=planner, meter="prediction")


def test_a_step_between_forward_and_backward_is_refused(toys):
    """Weights that an optimizer moved would be recomputed with: an error says so."""
    model = toys.chain(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _attach(model):
        model(toys.inputs()).backward()
        loss = model(toys.inputs())
        optimizer.step()
        with pytest.raises(mimose.ChangedWeightsError, match="an optimizer step"):
            loss.backward()
        del loss
        model.zero_grad()
        model(toys.inputs()).backward()
    assert [] == toys.leftovers(model)


def test_a_functional_call_is_refused_where_it_would_be_recomputed(toys):
    """The weights lent to a call are gone in backward; a layer that keeps is exact."""
    model = toys.chain(3)
    lent = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    call = torch.func.functional_call
    torch.manual_seed(0)
    expected = torch.autograd.grad(call(model, lent, toys.inputs()), [*lent.values()])
    with _attach(model, "none"):
        torch.manual_seed(0)
        loss = call(model, lent, toys.inputs())
        actual = torch.autograd.grad(loss, [*lent.values()])
    assert all(map(torch.equal, expected, actual))
    with _attach(model):
        loss = call(model, lent, toys.inputs())
        with pytest.raises(mimose.ChangedWeightsError, match="functional_call"):
            loss.backward()


def test_a_step_within_the_backward_is_none_of_its_business(toys):
    """Optimizers that step layer by layer as gradients come are exact."""

    def train(model):
        torch.manual_seed(1)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(toys.inputs()).backward()
        return [p.detach().clone() for p in model.parameters()]

    model = toys.chain(4)
    expected = train(copy.deepcopy(model))
    with _attach(model):
        actual = train(model)
    assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("part", ["all", "a child"])
def test_modes_changed_before_the_backward_are_those_of_the_forward(toys, part):
    """`model.eval()` before `backward()` changes nothing, and stays in force."""

    def step(model):
        torch.manual_seed(3)
        if part == "a child":
            model.blocks[1].dropout.eval()
        loss = model(toys.inputs())
        changed = model if part == "all" else model.blocks[1].dropout
        changed.train(not changed.training)
        modes = [module.training for module in model.modules()]
        loss.backward()
        assert modes == [module.training for module in model.modules()]
        return _gradients(model)

    model = toys.chain(3)
    expected = step(copy.deepcopy(model))
    with _attach(model):
        actual = step(model)
    for name, gradient in expected.items():
        assert torch.equal(gradient, actual[name]), name
