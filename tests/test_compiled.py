"""Compiled models are refused, in words."""

import pytest
import torch

import mimose


@pytest.mark.parametrize("name", ["", "blocks.1"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_refused(toys, name, in_place):
    """Whether wrapped or compiled in place, whole or in part."""
    model = toys.chain(3)
    part = model.get_submodule(name)
    if in_place:
        part.compile(backend="eager")
    elif name:
        model.blocks[1] = torch.compile(part, backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(mimose.MimoseError, match="is compiled, and what a compiled"):
        mimose.attach(model, "1GiB")
