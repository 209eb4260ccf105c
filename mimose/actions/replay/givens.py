"""What a recipe was given from elsewhere than the graph: does it still hold?

A number that no node has saved may change with an attribute of the module, and a norm
may be given another epsilon than its module's. As a rule that shows in the first row of
what they give, so that is computed again in each call, and a call where it is another
gets a recipe of its own. What shows elsewhere alone, or on an accelerator, which would
have to be waited for, is found when it is rebuilt: see
`mimose.actions.replay.seal`.
"""

from __future__ import annotations

from typing import Any

import torch

from mimose.actions.replay.operators import settings_of
from mimose.actions.replay.recipe import (
    Number,
    Recipe,
    Source,
    Step,
    owner_at,
    run_with,
    weight_of,
)
from mimose.actions.replay.unit_graph import Ran
from mimose.tensors import same_bits
from mimose.torch_private import parameters_of, saved_value

_LAYER_NORM = "NativeLayerNormBackward0"


def hold(recipe: Recipe, ran: Ran) -> bool:
    """Whether what a recipe was given gives again what is there.

    Args:
        recipe: To be used.
        ran: The call, nothing dropped yet.
    """
    return all(_CHECKS[step.source](step, ran) for step in recipe.given)


def _number_holds(step: Step, ran: Ran) -> bool:
    number: Number = step.told
    nodes = ran.nodes.nodes
    other, result = (
        saved_value(nodes[slot.node], slot.name).detach()
        for slot in (number.other, number.result)
    )
    if not other.is_cpu or other.shape != result.shape or not other.numel():
        return True
    told = settings_of(step.name, nodes[step.node])
    made = run_with(step.name, told, number.value, number.place, _row(other))
    return same_bits(made, _row(result))


def _epsilon_holds(step: Step, ran: Ran) -> bool:
    node = ran.nodes.nodes[step.node]
    weight = weight_of(ran.nodes, step.node)
    owner = owner_at(ran.module, step.told)
    if owner is None or not hasattr(owner, step.name):
        return False
    if not any(weight is own for own in parameters_of(owner).values()):
        return False  # a unit of the same kind, put together otherwise
    if ran.nodes.kinds[step.node] != _LAYER_NORM:
        return True
    x, rstd = saved_value(node, "input").detach(), saved_value(node, "result2")
    if not x.is_cpu or not x.numel():
        return True
    shape = saved_value(node, "normalized_shape")
    while x.dim() > len(shape):
        x, rstd = x[0], rstd[0]
    weight, bias = (saved_value(node, name) for name in ("weight", "bias"))
    eps = getattr(owner, step.name)
    _, _, made = torch.native_layer_norm(x[None], shape, weight, bias, eps)
    return same_bits(made.reshape(-1), rstd.detach().reshape(-1))


def _row(tensor: torch.Tensor) -> Any:
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor


_CHECKS = {Source.NUMBER: _number_holds, Source.EPSILON: _epsilon_holds}
