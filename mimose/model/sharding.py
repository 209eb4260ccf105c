"""How ranks share a model: DDP's wrapper, FSDP2's groups and tensor parallelism.

Note: [Groups of FSDP2]
`fully_shard` replaces a module's class and its parameters: each rank has a part, which
the optimizer updates. During a call and its backward the modules hold whole parameters
instead, with whole gradients until they are reduced. So a model's own parameters must
be read from the groups, and read again after the model was sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import distributed, nn

from mimose.exceptions import MimoseError
from mimose.tensors import is_dtensor, is_made_by
from mimose.torch_private import (
    fsdp_groups,
    host_offload_of,
    is_managed_by_fsdp,
    parameters_of,
    reshards_after_forward,
    shards_over,
)

_FSDP = "torch.distributed.fsdp"
_OF_DEEPSPEED = (
    "{} belongs to DeepSpeed, whose ZeRO moves weights and gradients in hooks that "
    "plans do not cover. Instead of ZeRO-1 use DDP with ZeroRedundancyOptimizer of "
    "torch.distributed.optim; instead of ZeRO-2 and ZeRO-3 use FSDP2 (fully_shard)"
)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module.

    Args:
        module: The module itself, without those inside.
    """
    return is_made_by(module, _FSDP, "FSDPModule")


def inside_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside DDP's wrapper; otherwise the model.

    The wrapper's forward communicates with other ranks before it runs the module's, so
    one rank alone must not run it again.

    Args:
        model: The model that the user trains.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def raise_if_unplannable(model: nn.Module) -> None:
    """Check that the model is sharded in no way that plans do not cover.

    Raises:
        MimoseError: FSDP1 or DeepSpeed has sharded the model or a part of it, or FSDP2
            holds weights on the host.
    """
    for name, group in groups_in(model):
        device = host_offload_of(group)
        if device is not None and device.type != "cpu":
            msg = (
                f"{name or 'the model'} keeps its weights on the host "
                f"(CPUOffloadPolicy) and computes on {device}, but a budget is for the "
                f"memory of one device: leave offload_policy out of fully_shard"
            )
            raise MimoseError(msg)
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        if is_made_by(module, _FSDP, "FullyShardedDataParallel"):
            msg = (
                f"{what} is sharded by FullyShardedDataParallel (FSDP1). It gathers "
                f"weights inside forwards, so a rank that recomputes a layer would "
                f"wait for the others: use FSDP2 (torch.distributed.fsdp.fully_shard, "
                f"called on each layer and then on the model)"
            )
            raise MimoseError(msg)
        if type(module).__module__.startswith("deepspeed."):
            raise MimoseError(_OF_DEEPSPEED.format(what))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):  # ZeRO-3 has partitioned it
            raise MimoseError(_OF_DEEPSPEED.format(f"the parameter {name}"))


def after_hooks(module: nn.Module, then: Callable[[], None]) -> None:
    """Call a function once, after the hooks of a module's running forward.

    One is FSDP2's, which frees the whole weights of the module's group. What is held
    after it is held when the loss begins.

    Args:
        module: The module, whose forward runs.
        then: The function.
    """

    def call(*_: object) -> None:
        handle.remove()
        then()

    handle = module.register_forward_hook(call)


def groups_in(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield FSDP2's groups in a model, each once with the name of its module.

    Args:
        model: The model.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        for group in fsdp_groups(module) if is_sharded(module) else ():
            if id(group) not in seen:
                seen.add(id(group))
                yield name, group


def own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates: Note: [Groups of FSDP2].

    Args:
        model: The model, sharded or not.
    """
    found = {
        id(one.sharded_param): one.sharded_param
        for _, group in groups_in(model)
        for one in group.fsdp_params
    }
    if not found:
        return list(model.parameters())
    managed = {
        id(parameter)
        for module in filter(is_managed_by_fsdp, model.modules())
        for parameter in module.parameters(recurse=False)
    }
    plain = {id(p): p for p in model.parameters() if id(p) not in managed}
    return list((found | plain).values())


def sharding(model: nn.Module) -> dict[str, str]:
    """Return by group how FSDP2 shards a model, as far as bytes depend on it.

    The number of replicas is left out, because it does not change a rank's bytes.

    Args:
        model: The model.
    """
    return {
        name or "the model": f"over {shards_over(group)} ranks, {group.mp_policy}"
        for name, group in groups_in(model)
    }


def communicates(layer: nn.Module) -> str:
    """Return why a layer's forward waits for other ranks; "" if it does not.

    It finds FSDP groups inside, synchronized batch norm (in evaluation mode too,
    because modes change), parameters of tensor parallelism, and wrappers that
    communicate. It does not find what a forward sends by its own calls (experts on
    other ranks, ring attention).

    Args:
        layer: The module whose ``forward`` would be recomputed.
    """
    for name, module in layer.named_modules():
        why = _why(module, is_layer=module is layer)
        if why:
            return f"{name or 'it'} {why}"
    return ""


def parallel_parts(module: nn.Module) -> dict[str, str]:
    """Return by name how tensor parallelism shares a module's own parameters.

    Each is the end of a sentence. Parameters that it does not share, or that it shares
    over one rank, are left out. In the device mesh, FSDP's dimension for shards may
    come after one for replicas; dimensions of tensor parallelism come after both.

    Args:
        module: The module itself, without those inside.
    """
    found = {}
    for name, parameter in parameters_of(module).items():
        if not is_dtensor(parameter):
            continue
        shared: Any = parameter
        mesh, placements = shared.device_mesh, list(enumerate(shared.placements))
        if is_managed_by_fsdp(module):
            shards = (dim for dim, placed in placements if not placed.is_replicate())
            placements = placements[next(shards, len(placements)) + 1 :]
        parts = [
            f", {placed!r} over {mesh.size(dim)} ranks"
            for dim, placed in placements
            if mesh.size(dim) > 1
        ]
        if parts:
            found[name] = "".join(parts)
    return found


def parallel_shares(model: nn.Module) -> dict[str, str]:
    """Return `parallel_parts` of a whole model.

    Args:
        model: The model.
    """
    return {
        f"{at}.{name}" if at else name: part
        for at, module in model.named_modules()
        for name, part in parallel_parts(module).items()
    }


def _why(module: nn.Module, *, is_layer: bool) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        is_on = distributed.is_available() and distributed.is_initialized()
        is_shared = is_on and distributed.get_world_size(module.process_group) > 1
        return "is a SyncBatchNorm" if is_shared else ""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "is a DistributedDataParallel"
    if is_made_by(module, _FSDP, "FullyShardedDataParallel"):
        return "is a FullyShardedDataParallel"
    groups = fsdp_groups(module) if is_sharded(module) and not is_layer else ()
    if any(reshards_after_forward(g) and shards_over(g) > 1 for g in groups):
        return "is a separate sharded group (fully_shard), gathered in each call"
    if parallel_parts(module):
        return "has parameters of tensor parallelism"
    return ""
