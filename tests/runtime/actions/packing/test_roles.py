"""What nodes read of what they saved."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mimose.actions.packing.base import Role
from mimose.actions.packing.roles import reader_of
from mimose.actions.replay.unit_graph import Nodes, Slot
from mimose.torch_private import next_sequence_number, saved_names, saved_value


def _readers(run, x):
    """By node and name, what each tensor was saved for."""
    began = next_sequence_number()
    nodes = Nodes([run(x)], [x], began, 1000)
    found = {}
    for number, node in enumerate(nodes.nodes):
        for name in saved_names(node):
            tensor = saved_value(node, name)
            if isinstance(tensor, torch.Tensor):
                reader = reader_of(nodes, Slot(number, name), tensor)
                assert not reader.tensor.requires_grad
                kind = nodes.kinds[number].split("Backward")[0]
                found[f"{kind}.{name}"] = reader.role, reader.settings
    return found


def _leaf(*shape):
    return torch.randn(shape, requires_grad=True)


WEIGHTS = {
    "convolution": (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), "Convolution.input", ()),
    "of a sequence": (nn.Conv1d(3, 4, 3), (2, 3, 8), "Convolution.input", ()),
    "transposed": (nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8), "Convolution.input", ()),
    "in groups": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8), "Convolution.input", ()),
    "without a batch": (nn.Conv2d(3, 4, 3), (3, 8, 8), "Convolution.input", ()),
    "linear": (nn.Linear(6, 4), (2, 5, 6), "Addmm.mat1", (2, 5, 6)),
    "without a bias": (nn.Linear(6, 4, bias=False), (2, 5, 6), "Mm.self", (2, 5, 6)),
    "of images": (nn.Linear(6, 4), (2, 5, 3, 6), "Addmm.mat1", (2, 5, 3, 6)),
    "of rows": (nn.Linear(6, 4), (5, 6), "Addmm.mat1", (5, 6)),
    "flattened": (
        nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        (2, 6, 4),
        "Addmm.mat1",
        (2, 24),
    ),
}


@pytest.mark.parametrize(
    ("module", "shape", "name", "settings"), WEIGHTS.values(), ids=WEIGHTS
)
def test_what_a_weights_gradient_alone_reads(module, shape, name, settings):
    """It may be averaged; the weight itself may not be touched."""
    found = _readers(module, _leaf(*shape))
    is_convolution = name.startswith("Convolution")
    role = Role.CONVOLUTION_WEIGHT if is_convolution else Role.LINEAR_WEIGHT
    assert found[name] == (role, settings)
    for weight in ("Convolution.weight", "Addmm.mat2", "Mm.mat2"):
        assert found.get(weight, (Role.FRAGILE, ())) == (Role.FRAGILE, ())


@pytest.mark.parametrize(
    ("run", "fragile", "smooth"),
    [
        (
            lambda x: functional.layer_norm(x, x.shape[-1:]),
            {"NativeLayerNorm.result1", "NativeLayerNorm.result2"},
            {"NativeLayerNorm.input"},
        ),
        (
            lambda x: functional.batch_norm(x, None, None, training=True),
            {"NativeBatchNorm.result1", "NativeBatchNorm.result2"},
            {"NativeBatchNorm.input"},
        ),
        (lambda x: x.clone().softmax(-1), set(), {"Softmax.result"}),
        (lambda x: x.clone().log_softmax(-1), {"LogSoftmax.result"}, set()),
        (lambda x: x.clone() / x.exp(), {"Div.other", "Exp.result"}, {"Div.self"}),
        (lambda x: x.clone().amax(-1), {"Amax.result", "Amax.self"}, set()),
        (lambda x: x.clone().pow(0.5), {"Pow.self"}, set()),
        (lambda x: x.clone().pow(2), set(), {"Pow.self"}),
        (lambda x: x.clone() * (x > 0), {"Mul.other"}, set()),
        (lambda x: functional.dropout(x.clone(), 0.5), set(), {"Mul.other"}),
        (lambda x: functional.gelu(x.clone()), set(), {"Gelu.self"}),
        (lambda x: x.clone().sort().values, {"Sort.indices"}, set()),
    ],
)
def test_what_a_small_change_would_spoil(run, fragile, smooth):
    """Statistics, logarithms, indices, masks, divisors, and the unknown."""
    found = {name: role for name, (role, _) in _readers(run, _leaf(4, 6, 8)).items()}
    assert fragile == {name for name, role in found.items() if role is Role.FRAGILE}
    assert smooth == {name for name, role in found.items() if role is Role.VALUE}


def test_names_are_those_that_torch_has():
    """Kinds of nodes and names in the tables: each is there, or it would do nothing."""
    from mimose.actions.packing import roles

    named = [*roles._ROLES, ("PowBackward0", "self")]
    named += [(kind, n) for kind, (names, *_) in roles._PRODUCTS.items() for n in names]
    for kind, name in named:
        node = getattr(torch._C._functions, kind, None)
        if node is not None or not kind.startswith(("Cudnn", "Miopen")):
            assert hasattr(node, f"_raw_saved_{name}"), (kind, name)
