"""Units whose forward communicates: their recomputation has to run on all ranks alike.

What a unit's call does around its ``forward`` (the hooks of its own `fully_shard`) does
not run again in a recomputation, so it does not count here. Nor does what goes over one
rank: nobody waits for it.
"""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from mimose.inputs.sharding import is_sharded
from mimose.tensors import is_dtensor, is_made_by
from mimose.torch_private import (
    fsdp_groups,
    is_managed_by_fsdp,
    parameters_of,
    reshards_after_forward,
    shards_over,
)

_FSDP = "torch.distributed.fsdp"


def communicates(unit: nn.Module) -> str:
    """Return why a unit's forward waits for other ranks; "" where it does not.

    Found are FSDP groups inside of it, batch norm over all ranks (in evaluation, too,
    where it sends nothing, for modes change), parameters of tensor parallelism, and
    wrappers that communicate themselves. What a forward sends by calls of its own
    (experts on other ranks, attention over a ring) is not.

    Args:
        unit: The module whose ``forward`` would run again.
    """
    for name, module in unit.named_modules():
        why = _why(module, is_unit=module is unit)
        if why:
            return f"{name or 'it'} {why}"
    return ""


def parallel_parts(module: nn.Module) -> dict[str, str]:
    """Return how tensor parallelism shares a module's own parameters, by their names.

    Parameters that it does not share, or over one rank, are told by "". FSDP shards
    along one dimension of the ranks, which another before it may replicate; those of
    tensor parallelism come behind.

    Args:
        module: The module; what is inside of it is not looked at.
    """
    is_managed = is_managed_by_fsdp(module)
    return {
        name: _parallel_part(parameter, is_managed=is_managed)
        for name, parameter in parameters_of(module).items()
        if is_dtensor(parameter)
    }


def parallel_shares(model: nn.Module) -> dict[str, str]:
    """Return what `parallel_parts` says of a whole model, ready to be read on.

    Args:
        model: The model.
    """
    return {
        f"{at}.{name}" if at else name: f", {part}"
        for at, module in model.named_modules()
        for name, part in parallel_parts(module).items()
        if part
    }


def _parallel_part(parameter: Any, *, is_managed: bool) -> str:
    mesh, placements = parameter.device_mesh, list(enumerate(parameter.placements))
    if is_managed:
        shards = (dim for dim, placed in placements if not placed.is_replicate())
        placements = placements[next(shards, len(placements)) + 1 :]
    found = [
        f"{placed!r} over {mesh.size(dim)} ranks"
        for dim, placed in placements
        if mesh.size(dim) > 1
    ]
    return ", ".join(found)


def _why(module: nn.Module, *, is_unit: bool) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return _of_batch_norm(module)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "is a DistributedDataParallel"
    if is_made_by(module, _FSDP, "FullyShardedDataParallel"):
        return "is a FullyShardedDataParallel"
    groups = fsdp_groups(module) if is_sharded(module) and not is_unit else ()
    if any(reshards_after_forward(g) and shards_over(g) > 1 for g in groups):
        return "is a sharded group of its own (fully_shard), gathered in each call"
    if any(parallel_parts(module).values()):
        return "has parameters of tensor parallelism"
    return ""


def _of_batch_norm(module: nn.SyncBatchNorm) -> str:
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    n_ranks = distributed.get_world_size(module.process_group)
    return "is a SyncBatchNorm" if n_ranks > 1 else ""
