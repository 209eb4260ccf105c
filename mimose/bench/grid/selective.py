"""Selective checkpointing: a layer of which some operators' results are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mimose.bench.grid.strategies import Applied
from mimose.watch.patch import Patch

Policy: TypeAlias = Callable[..., CheckpointPolicy]
"""Takes torch's context, an operator and its arguments, as torch asks for."""


class Selective(Applied):
    """Layers under selective checkpointing.

    Args:
        policies: The layers, each with what makes a policy for one call of it. It is
            asked for every operator of the forward; by some versions of torch for those
            of the recomputation as well.
        may_mutate: Whether what is kept may be changed in place afterwards: where the
            operator that does so is kept as well.
    """

    def __init__(
        self,
        policies: Iterable[tuple[nn.Module, Callable[[], Policy]]],
        *,
        may_mutate: bool = False,
    ) -> None:
        self._layers = [_Layer(module, make, may_mutate) for module, make in policies]

    def close(self) -> None:
        """Give the layers back as they were."""
        for layer in self._layers:
            layer.remove()


class _Layer(Patch):
    """One layer whose forward runs under a policy."""

    def __init__(
        self, module: nn.Module, make_policy: Callable[[], Policy], may_mutate: bool
    ) -> None:
        super().__init__(module)
        self._make_policy = make_policy
        self._may_mutate = may_mutate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; evaluation is left alone."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            self._make_policy(),
            allow_cache_entry_mutation=self._may_mutate,
        )
        return checkpoint(
            self.original, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )


class EverySecondProduct:
    """torchtitan's choice: attention is kept, and every second matrix product."""

    def __init__(self) -> None:
        self._n_products = {True: 0, False: 0}

    def __call__(
        self, context: Any, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Return whether an operator's result is kept."""
        del args, kwargs
        packet = operator.overloadpacket
        keeps = packet in _ATTENTION
        if packet in _PRODUCTS:
            is_again = bool(context.is_recompute)
            self._n_products[is_again] += 1
            keeps = self._n_products[is_again] % 2 == 1
        return policy_of(keeps)


def only_attention(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Keep attention and nothing else; of eager attention, its two products."""
    del context, args, kwargs
    packet = operator.overloadpacket
    return policy_of(packet in _ATTENTION or packet in _EAGER_ATTENTION)


def policy_of(keeps: bool) -> CheckpointPolicy:
    """Return what torch is told where a result is kept, and where it is not."""
    if keeps:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_aten: Any = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm)
_EAGER_ATTENTION = (_aten.bmm, _aten.baddbmm)
"""Products of batches of matrices: linear layers have none."""
_ATTENTION = (
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
)
