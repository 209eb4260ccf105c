"""How many bytes an optimizer's state takes, or will take once it has stepped."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from mimose.tensors import local, storages_in

_Elements: TypeAlias = Callable[[Mapping[str, Any], torch.Size], float]
"""From a parameter's group and shape to the number of elements of its state."""


def state_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Return the bytes that an optimizer's state holds on a device.

    Args:
        optimizer: Its counts of steps are on the CPU unless it is capturable or fused.
        device: What is elsewhere (offloaded state, say) does not count.
    """
    storages = storages_in(optimizer.state).values()
    return sum(s.nbytes() for s in storages if s.device == device)


def bytes_to_come(
    optimizer: Optimizer, device: torch.device
) -> dict[torch.Tensor, float]:
    """Return what an optimizer's first step will make on a device, by parameter.

    Known of torch's own optimizers and what is derived from them; of others, and of
    LBFGS, nothing is. (Adagrad makes its state when it is made.) Parameters that are
    not trained, or that have their state already, are left out, and so is the count
    of steps, one number each.

    Args:
        optimizer: One that has not stepped yet.
        device: What will be made elsewhere does not count.
    """
    kinds = (_ELEMENTS[kind] for kind in type(optimizer).__mro__ if kind in _ELEMENTS)
    elements = next(kinds, None)
    if elements is None:
        return {}
    return {
        parameter: elements(group, local(parameter).shape) * parameter.element_size()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        and parameter.device == device
        and not optimizer.state.get(parameter)
    }


def optimizers_of(parameters: Collection[int]) -> Iterator[Optimizer]:
    """Find the optimizers of some parameters among all objects that are alive.

    torch keeps no list of them, and tells of one only when it steps. This takes about
    as long as a garbage collection. Wrappers that show another's groups as their own
    are left out: what they wrap is found itself.

    Args:
        parameters: Their identities.
    """
    for thing in gc.get_objects():
        # Not isinstance, which asks proxies for the class of what they stand for.
        if not issubclass(type(thing), Optimizer) or "param_groups" not in vars(thing):
            continue
        if any(id(parameter) in parameters for parameter in parameters_of(thing)):
            yield thing


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all of an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _copies(number: Callable[[Mapping[str, Any]], int] | int) -> _Elements:
    """Return the elements of so many tensors of a parameter's shape."""

    def elements(group: Mapping[str, Any], shape: torch.Size) -> float:
        n_copies = number if isinstance(number, int) else number(group)
        return float(n_copies * shape.numel())

    return elements


def _of_adafactor(_: Mapping[str, Any], shape: torch.Size) -> float:
    """Count a number a row and one a column; all of it where there are no columns."""
    n_elements = shape.numel()
    if len(shape) < 2 or not n_elements:
        return float(n_elements)
    return n_elements / shape[-1] + n_elements / shape[-2]


_ELEMENTS: dict[type, _Elements] = {
    Adam: _copies(lambda group: 3 if group.get("amsgrad") else 2),  # AdamW is one
    NAdam: _copies(2),
    RAdam: _copies(2),
    Adamax: _copies(2),
    Adadelta: _copies(2),
    Rprop: _copies(2),
    SparseAdam: _copies(2),
    ASGD: _copies(1),
    Adafactor: _of_adafactor,
    SGD: _copies(lambda group: int(bool(group.get("momentum")))),
    RMSprop: _copies(
        lambda group: 1 + bool(group.get("centered")) + bool(group.get("momentum"))
    ),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    _ELEMENTS[torch.optim.Muon] = _copies(1)
