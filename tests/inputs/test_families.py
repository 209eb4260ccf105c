"""Which calls share what is learned."""

import pytest
import torch
from torch import nn

from mimose.inputs.describe import call_shape, family_key, module_key

CPU = torch.device("cpu")


def _key(module, *args, **kwargs):
    return family_key(module_key(module), call_shape(args, kwargs), CPU)


def test_layers_of_one_model_are_a_family(toys):
    """Equal layers differ in their place and their weights, not in their costs."""
    layers = toys.zoo_model("gpt2").transformer.h
    x = torch.zeros(2, 5, 32)
    assert 1 == len({_key(layer, x) for layer in layers})
    assert _key(layers[0], x) == _key(layers[0], torch.zeros(3, 9, 32))


def _frozen(block):
    block.up.weight.requires_grad_(False)


def _evaluated(block):
    block.dropout.eval()


def _halved(block):
    block.half()


def _with_other_activation(block):
    block.activation = nn.GELU()


@pytest.mark.parametrize(
    "change", [_frozen, _evaluated, _halved, _with_other_activation]
)
def test_what_parts_families(toys, change):
    """Frozen parameters, evaluated children, types and parts cost differently."""
    x = torch.zeros(2, 16)
    plain, changed = toys.Block(), toys.Block()
    change(changed)
    assert _key(plain, x) != _key(changed, x)


def test_arguments_part_families(toys):
    """Which arguments are None, and which want a gradient, changes the cost."""
    block, x = toys.Block(), torch.zeros(2, 16)
    keys = {
        _key(block, x),
        _key(block, x.clone().requires_grad_()),
        _key(block, x, None),
        _key(block, x, torch.ones(2)),
        _key(block, x, flag=True),
    }
    assert 5 == len(keys)
