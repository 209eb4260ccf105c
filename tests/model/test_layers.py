"""Finding layers, and taking over a forward without leaving a trace."""

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from mimose import CheckpointingConflictError, NoUnitsError
from mimose.model.layers import find_layers, raise_if_checkpointed

EXPECTED = {
    "bert": [f"bert.encoder.layer.{i}" for i in range(3)],
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "t5": [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)],
    "vit": [f"vit.layers.{i}" for i in range(3)],
    "albert": ["albert.encoder.albert_layer_groups.0"],
    "resnet": [
        "resnet.encoder.stages.0.layers.0",
        "resnet.encoder.stages.0.layers.1",
        "resnet.encoder.stages.1.layers.0",
        "resnet.encoder.stages.2.layers.0",
        "resnet.encoder.stages.3.layers.0",
        "resnet.encoder.stages.3.layers.1",
    ],
}


def _names(found):
    return [name for name, _ in found]


@pytest.mark.parametrize("name", EXPECTED)
def test_units_of_the_zoo(toys, name):
    """Layers and blocks of the six architectures are found, in module order."""
    assert EXPECTED[name] == _names(find_layers(toys.zoo_model(name)))


def test_a_stage_of_checkpointable_layers_is_no_layer():
    """Swin's stages are `GradientCheckpointingLayer`s, and so are their layers."""

    class GradientCheckpointingLayer(nn.Module):
        """Stands for the class of transformers, which is known by its name."""

    class Stage(GradientCheckpointingLayer):
        """Holds layers of the same kind."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(GradientCheckpointingLayer() for _ in range(2))

    model = nn.ModuleDict({"a": Stage(), "b": Stage()})
    names = [name for name, _ in find_layers(model, None)]
    assert ["a.layers.0", "a.layers.1", "b.layers.0", "b.layers.1"] == names


def test_no_split_modules_are_found():
    """Without repeated blocks, the classes a model names itself are taken."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Conv1d(4, 4, 1)})
    model._no_split_modules = ["Conv1d"]
    assert ["b"] == _names(find_layers(model))


def test_units_by_name(toys):
    """A name is one module; that of a `ModuleList` is its elements."""
    model = toys.chain(3)
    assert ["blocks.1"] == _names(find_layers(model, "blocks.1"))
    assert ["blocks.0", "blocks.1", "blocks.2"] == _names(find_layers(model, "blocks"))


def test_units_by_predicate(toys):
    """A predicate takes the module, or the name and the module."""
    model = toys.chain(3)
    by_module = find_layers(model, lambda module: isinstance(module, toys.Block))
    by_name = find_layers(model, lambda name, module: name.endswith("s.1"))
    assert ["blocks.0", "blocks.1", "blocks.2"] == _names(by_module)
    assert ["blocks.1"] == _names(by_name)


def test_a_layer_inside_a_layer_is_dropped(toys):
    """Layers do not nest: the outer one is taken."""
    model = toys.chain(2)
    found = find_layers(model, [toys.Block, "blocks.0.up"])
    assert ["blocks.0", "blocks.1"] == _names(found)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ("bert.encoder.layr", r"did you mean bert\.encoder\.layer"),
        ("BertLayer", "layers=BertLayer"),
        ("BertLayr", "BertLayer"),
        ("transformer.h", "shows all names"),
        ([3], "not int objects"),
    ],
)
def test_a_choice_that_finds_nothing_says_what_could_be_meant(toys, layers, complaint):
    """Near names are suggested."""
    with pytest.raises(NoUnitsError, match=complaint):
        find_layers(toys.zoo_model("bert"), layers)


def test_modules_themselves_are_refused(toys):
    """Whoever passes a module, or several, is told to pass its name or class."""
    model = toys.chain(2)
    with pytest.raises(NoUnitsError, match="not ModuleList objects"):
        find_layers(model, model.blocks)
    with pytest.raises(NoUnitsError, match="not Block objects"):
        find_layers(model, [model.blocks[1]])


def test_checkpoint_wrapper_is_refused(toys):
    """A block in torch's checkpoint wrapper is a second owner."""
    model = toys.chain(2)
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    with pytest.raises(CheckpointingConflictError, match=r"blocks\.1.*wrapper"):
        raise_if_checkpointed(model)
