"""How the ranks of a training share a model: FSDP2's groups and its wrappers.

The modules of torch that make these things are looked up where they are imported
already: without them there is nothing of theirs in a model, and to import them takes a
second.
"""

from __future__ import annotations

import sys

from torch import nn


def is_made_by(thing: object, module: str, kind: str) -> bool:
    """Whether something is an object of a class of torch that may not be imported.

    Args:
        thing: A module or a tensor.
        module: Where the class is.
        kind: Its name.
    """
    cls = getattr(sys.modules.get(module), kind, None)
    return cls is not None and isinstance(thing, cls)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module.

    Args:
        module: The module itself; modules inside of it are not looked at.
    """
    return is_made_by(module, "torch.distributed.fsdp", "FSDPModule")


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is one of several ranks together, each of which holds a part.

    Args:
        tensor: The tensor.
    """
    return is_made_by(tensor, "torch.distributed.tensor", "DTensor")
