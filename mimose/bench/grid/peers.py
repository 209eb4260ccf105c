"""What other libraries offer, through their own public interfaces.

A peer that cannot run on a machine stays in the results, as a row that says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mimose.bench.grid.strategies import Applied, CannotRunError, Setup, Strategy
from mimose.units import Patch, find_units

_NO_ACCELERATOR = "it moves tensors off an accelerator, and there is none"
_NOT_TRIED = "it needs CUDA, and was never tried here for want of it"


class _Closing(Applied):
    """A peer that is switched off by a call."""

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close

    def close(self) -> None:
        """Switch it off."""
        self._close()


# ------------------------------------------------------------------ transformers


def _switch(setup: Setup) -> tuple[Callable[..., Any], Callable[[], Any]]:
    model: Any = setup.model
    if hasattr(model, "activation_checkpointing_enable"):
        return (
            model.activation_checkpointing_enable,
            model.activation_checkpointing_disable,
        )
    return model.gradient_checkpointing_enable, model.gradient_checkpointing_disable


def _transformers(**options: Any) -> Callable[[Setup], Applied]:
    def apply(setup: Setup) -> Applied:
        if not hasattr(setup.model, "gradient_checkpointing_enable"):
            msg = f"{type(setup.model).__name__} is no model of transformers"
            raise CannotRunError(msg)
        enable, disable = _switch(setup)
        known = inspect.signature(enable).parameters
        unknown = [name for name in options if name not in known]
        if unknown:
            msg = f"this version of transformers knows no {', '.join(unknown)}"
            raise CannotRunError(msg)
        enable(**options)
        return _Closing(disable)

    return apply


# ------------------------------------------------------------------ torch


class _Selective(Patch):
    """A layer under selective checkpointing: some operators' results are kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; a policy of its own counts its products."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        contexts = functools.partial(
            create_selective_checkpoint_contexts, _EverySecondProduct()
        )
        return checkpoint(
            self.original, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )


class _EverySecondProduct:
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
        kept = CheckpointPolicy.MUST_SAVE
        return kept if keeps else CheckpointPolicy.PREFER_RECOMPUTE


_aten: Any = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm)
_ATTENTION = (
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
)


def _selective(setup: Setup) -> Applied:
    patches = [_Selective(module) for _, module in find_units(setup.model)]

    def close() -> None:
        for patch in patches:
            patch.remove()

    return _Closing(close)


class _Around(Patch):
    """A model whose forward runs inside a context."""

    def __init__(
        self,
        model: torch.nn.Module,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        super().__init__(model)
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in the context."""
        with self._context():
            return self.original(*args, **kwargs)


def _save_on_cpu(setup: Setup) -> Applied:
    context = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
    return _Closing(_Around(setup.model, context).remove)


# ------------------------------------------------------------------ torch.compile


_RATIOS = (0.75, 0.5, 0.25, 0.0)
"""Tried from the largest; each is another compilation."""


class _Compiled(Patch):
    """A model whose forward is compiled."""

    def __init__(self, model: torch.nn.Module, backend: str) -> None:
        super().__init__(model)
        compiled: Any = torch.compile(self.original, backend=backend, dynamic=True)
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        return self._compiled(*args, **kwargs)


def _compile_budget(setup: Setup) -> Applied:
    """Find the largest ratio with which the longest batch stays within the budget."""
    import torch._functorch.config as functorch
    from torch._dynamo import reset

    functorch_config: Any = functorch
    backend = "aot_eager_decomp_partition"
    if setup.device.type != "cpu":
        backend = "inductor"
    stack = contextlib.ExitStack()
    for ratio in _RATIOS:
        reset()
        stack.close()
        stack.enter_context(functorch_config.patch(activation_memory_budget=ratio))
        patch = _Compiled(setup.model, backend)
        stack.callback(patch.remove)
        for _ in range(2):  # the first compiles
            setup.meter.clean_up()
            start = setup.meter.settled_bytes(0)
            setup.meter.reset_peak()
            setup.try_step(setup.longest)
            growth = setup.meter.peak_bytes() - start
        if growth <= setup.headroom_bytes:
            break
    setup.meter.clean_up()
    return _Closing(stack.close)


# ------------------------------------------------------------------ why not


def _only_with_accelerator(kind: str) -> str:
    return _NO_ACCELERATOR if kind == "cpu" else ""


def _trl(kind: str) -> str:
    if importlib.util.find_spec("trl") is None:
        return "trl is not installed"
    return _only_with_accelerator(kind)


def _trl_offload(setup: Setup) -> Applied:
    from trl.models import get_act_offloading_ctx_manager

    context = get_act_offloading_ctx_manager(setup.model)
    return _Closing(_Around(setup.model, lambda: context).remove)


def _autosac(kind: str) -> str:
    if kind == "cpu":
        return "its time model (torch.distributed._tools.RuntimeEstimator) needs CUDA"
    if importlib.util.find_spec("pulp") is None:
        return "pulp is not installed"
    return _NOT_TRIED


def _rockmate(kind: str) -> str:
    if kind == "cpu":
        return "it asserts that the model is on CUDA"
    if importlib.util.find_spec("rockmate") is None:
        return "rockmate is not installed"
    return _NOT_TRIED


def _unable(setup: Setup) -> Applied:
    raise CannotRunError(_NOT_TRIED)


PEERS = (
    Strategy(
        name="hf-full",
        what="transformers: activation checkpointing of every layer",
        apply=_transformers(),
        heeds_budget=False,
    ),
    Strategy(
        name="hf-every-2",
        what="transformers: activation checkpointing of every second layer",
        apply=_transformers(every_n_layers=2),
        heeds_budget=False,
    ),
    Strategy(
        name="hf-offload",
        what="transformers: checkpointing, layers' inputs offloaded",
        apply=_transformers(offload=True),
        heeds_budget=False,
        why_not=_only_with_accelerator,
    ),
    Strategy(
        name="selective",
        what="torch: selective checkpointing with torchtitan's operators",
        apply=_selective,
        heeds_budget=False,
    ),
    Strategy(
        name="compile-budget",
        what="torch.compile: activation_memory_budget, chosen for the longest batch",
        apply=_compile_budget,
        heeds_budget=True,
        is_counted=False,
    ),
    Strategy(
        name="save-on-cpu",
        what="torch: every saved tensor offloaded",
        apply=_save_on_cpu,
        heeds_budget=False,
        why_not=_only_with_accelerator,
    ),
    Strategy(
        name="trl-offload",
        what="TRL: saved tensors offloaded in a stream of their own",
        apply=_trl_offload,
        heeds_budget=False,
        why_not=_trl,
    ),
    Strategy(
        name="autosac",
        what="torch: AutoSAC's integer program",
        apply=_unable,
        heeds_budget=True,
        why_not=_autosac,
    ),
    Strategy(
        name="rockmate",
        what="Rockmate: a schedule by integer programming",
        apply=_unable,
        heeds_budget=True,
        why_not=_rockmate,
    ),
)
"""The peers."""
