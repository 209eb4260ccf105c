"""Units whose forward communicates: their recomputation has to run on all ranks alike.

What a unit's call does around its ``forward`` (the hooks of its own `fully_shard`) does
not run again in a recomputation, so it does not count here.
"""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from mimose.tensors import is_dtensor, is_made_by
from mimose.torch_private import (
    fsdp_groups,
    is_managed_by_fsdp,
    parameters_of,
    reshards_after_forward,
)
from mimose.watch.sharding import is_sharded

_FSDP = "torch.distributed.fsdp"


def communicates(unit: nn.Module) -> str:
    """Return why a unit's forward waits for other ranks; "" where it does not.

    Found are FSDP groups inside of it, batch norm over all ranks, parameters of tensor
    parallelism, and wrappers that communicate themselves. What a forward sends by calls
    of its own (experts on other ranks, attention over a ring) is not.

    Args:
        unit: The module whose ``forward`` would run again.
    """
    for name, module in unit.named_modules():
        why = _why(module, is_unit=module is unit)
        if why:
            return f"{name or 'it'} {why}"
    return ""


def _why(module: nn.Module, *, is_unit: bool) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return _of_batch_norm(module)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "is a DistributedDataParallel"
    if is_made_by(module, _FSDP, "FullyShardedDataParallel"):
        return "is a FullyShardedDataParallel"
    is_group = is_sharded(module) and not is_unit
    if is_group and any(map(reshards_after_forward, fsdp_groups(module))):
        return "is a sharded group of its own (fully_shard), gathered in each call"
    is_managed = is_managed_by_fsdp(module)
    found = filter(is_dtensor, parameters_of(module).values())
    if any(not is_managed or _is_parallel_too(dtensor) for dtensor in found):
        return "has parameters of tensor parallelism"
    return ""


def _of_batch_norm(module: nn.SyncBatchNorm) -> str:
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    n_ranks = distributed.get_world_size(module.process_group)
    return "is a SyncBatchNorm" if n_ranks > 1 else ""


def _is_parallel_too(parameter: Any) -> bool:
    """Whether a parameter that FSDP shards is a part of one of tensor parallelism.

    FSDP alone shards along one dimension of the ranks, which another may replicate.
    """
    *outer, _ = parameter.placements
    return len(outer) > 1 or any(not placement.is_replicate() for placement in outer)
