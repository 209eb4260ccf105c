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
        for _ in range(2):
            with pytest.raises(mimose.ChangedWeightsError, match="an optimizer step"):
                loss.backward(retain_graph=True)
        del loss
        model.zero_grad()
        model(toys.inputs()).backward()
    assert [] == toys.leftovers(model)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_tensors_of_its_own_that_change_before_the_backward(toys, kind):
    """One that is replaced is found again; one that is edited is missed, by name."""

    class Scaled(torch.nn.Module):
        """A block scaled by a tensor."""

        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(()))
            else:
                self.scale = torch.ones(())

        def forward(self, x):
            """Run it."""
            return x + torch.relu(self.linear(x)) * self.scale

    model = toys.chain(3, make=Scaled)
    model(toys.inputs()).backward()
    expected = _gradients(model)
    with _attach(model):
        for _ in range(2):
            model.zero_grad()
            loss = model(toys.inputs())
            mine, model.blocks[1].scale = model.blocks[1].scale, torch.tensor(2.0)
            loss.backward()
            model.blocks[1].scale = mine
            for name, gradient in _gradients(model).items():
                assert torch.equal(gradient, expected[name]), name
        loss = model(toys.inputs())
        model.blocks[1].scale.add_(1.0)
        with pytest.raises(mimose.ChangedWeightsError, match=r"'scale' of blocks\.1"):
            loss.backward()


def test_another_part_of_the_model_may_change_meanwhile(toys):
    """A teacher's average, another tower's step: what is recomputed is untouched."""

    class Towers(torch.nn.Module):
        """Two chains on one input, each with a loss."""

        def __init__(self):
            super().__init__()
            self.blocks = toys.chain(2).blocks
            self.others = toys.chain(2).blocks

        def forward(self, x):
            """Run it."""
            first, second = x, x
            for block, other in zip(self.blocks, self.others, strict=True):
                first, second = block(first), other(second)
            return first.square().mean(), second.square().mean()

    def train(model):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            first, second = model(toys.inputs())
            first.backward()
            optimizer.step()
            second.backward()
        return _gradients(model)

    model = Towers()
    expected = train(copy.deepcopy(model))
    with _attach(model):
        actual = train(model)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
