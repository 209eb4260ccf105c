"""What other libraries offer, through their own public interfaces.

A peer that cannot run on a machine stays in the results, as a row that says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
from filelock import FileLock

from mimose.bench.child import RunFailedError
from mimose.bench.grid.autosac import auto_sac, why_no_auto_sac
from mimose.bench.grid.remat import torch_remat, why_no_remat
from mimose.bench.grid.selective import EverySecondProduct, Selective, only_attention
from mimose.bench.grid.strategies import Applied, Setup, Strategy
from mimose.measure.out_of_memory import is_out_of_memory
from mimose.watch.patch import Patch
from mimose.watch.units import find_units

_NO_ACCELERATOR = "it moves tensors off an accelerator, and there is none"
_ONE_SHAPE = "its schedule holds for one sample's shape, and these batches differ"


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
            raise RunFailedError(msg)
        enable, disable = _switch(setup)
        known = inspect.signature(enable).parameters
        unknown = [name for name in options if name not in known]
        if unknown:
            msg = f"this version of transformers knows no {', '.join(unknown)}"
            raise RunFailedError(msg)
        enable(**options)
        return _Closing(disable)

    return apply


# ------------------------------------------------------------------ torch


def _selective(setup: Setup) -> Applied:
    layers = [module for _, module in find_units(setup.model, setup.units)]
    return Selective((layer, EverySecondProduct) for layer in layers)


def _selective_attention(setup: Setup) -> Applied:
    layers = [module for _, module in find_units(setup.model, setup.units)]
    return Selective((layer, lambda: only_attention) for layer in layers)


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


_ALL_BYTES = 2**62
_RATIOS = tuple(i / 8 for i in range(8, -1, -1))
"""Of what torch saves without a budget: 1 is its default, 0 recomputes everything."""


class _Compiled(Patch):
    """A model whose forward is compiled."""

    def __init__(
        self, model: torch.nn.Module, backend: str, *, is_dynamic: bool
    ) -> None:
        super().__init__(model)
        self._compiled: Any = torch.compile(
            self.original, backend=backend, dynamic=is_dynamic
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        return self._compiled(*args, **kwargs)


class _CompiledWithin(Applied):
    """A model compiled with a budget for what is saved for backward."""

    def __init__(self, setup: Setup, ratio: float, *, is_dynamic: bool = True) -> None:
        import torch._functorch.config as functorch
        from torch._dynamo import reset

        self._setup = setup
        config: Any = functorch
        on_cpu = setup.device.type == "cpu"
        backend = "aot_eager_decomp_partition" if on_cpu else "inductor"
        with contextlib.ExitStack() as stack:
            stack.callback(reset)
            stack.enter_context(config.patch(activation_memory_budget=ratio))
            compiled = _Compiled(setup.model, backend, is_dynamic=is_dynamic)
            stack.callback(compiled.remove)
            setup.try_step(setup.longest)  # compiles
            setup.meter.clean_up()
            self._stack = stack.pop_all()

    def growth_bytes(self) -> int:
        """Measure what a step on the longest batch grows by."""
        meter = self._setup.meter
        start = meter.settled_bytes(0)
        meter.reset_peak()
        self._setup.try_step(self._setup.longest)
        growth = meter.peak_bytes() - start
        meter.clean_up()
        return growth

    def close(self) -> None:
        """Go back to the model as it was."""
        self._stack.close()


def _compile_budget(setup: Setup) -> Applied:
    """Take the largest ratio with which the longest batch is within the budget.

    Trials are compiled for that batch alone, which takes far less time: what is saved
    for backward is chosen by the same sizes. What is then compiled for all
    sizes is measured again; where no ratio fits, the one that needs least is taken.
    """
    growths: dict[float, int] = {}
    for ratio in _RATIOS:
        growths[ratio] = _tried(setup, ratio)
        if growths[ratio] > setup.headroom_bytes:
            continue
        compiled = _CompiledWithin(setup, ratio)
        if compiled.growth_bytes() <= setup.headroom_bytes:
            return compiled
        compiled.close()
    return _CompiledWithin(setup, min(growths, key=lambda ratio: growths[ratio]))


def _tried(setup: Setup, ratio: float) -> int:
    """Return what the longest batch grows by with a ratio.

    What one budget's process has tried the others need not: they ask one at a time.
    """
    path = setup.shared / f"compile-budget-{ratio}.json"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            path.write_text(json.dumps(_trial(setup, ratio)), "utf-8")
        growth: int = json.loads(path.read_text("utf-8"))
    return growth


def _trial(setup: Setup, ratio: float) -> int:
    """Compile for the longest batch; where memory runs out it grows by all there is."""
    try:
        trial = _CompiledWithin(setup, ratio, is_dynamic=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        setup.model.zero_grad()
        return _ALL_BYTES
    growth = trial.growth_bytes()
    trial.close()
    return growth


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


def _rockmate(kind: str) -> str:
    return "it asserts that the model is on CUDA" if kind != "cuda" else _ONE_SHAPE


def _unable(setup: Setup) -> Applied:
    raise RunFailedError(_ONE_SHAPE)


PEERS = (
    Strategy(
        "hf-full",
        "transformers: activation checkpointing of every layer",
        _transformers(),
    ),
    Strategy(
        "hf-every-2",
        "transformers: activation checkpointing of every second layer",
        _transformers(every_n_layers=2),
    ),
    Strategy(
        "hf-offload",
        "transformers: checkpointing, layers' inputs offloaded",
        _transformers(offload=True),
        why_not=_only_with_accelerator,
    ),
    Strategy(
        "selective",
        "torch: selective checkpointing with torchtitan's operators",
        _selective,
    ),
    Strategy(
        "selective-attention",
        "torch: selective checkpointing, attention alone is kept",
        _selective_attention,
    ),
    Strategy(
        "torch-remat",
        "torch_remat: every layer replayed but for its linear layers and attention",
        torch_remat,
        why_not=why_no_remat,
    ),
    Strategy(
        "compile-budget",
        "torch.compile: activation_memory_budget, chosen for the longest batch",
        _compile_budget,
        heeds_budget=True,
        is_counted=False,
    ),
    Strategy(
        "save-on-cpu",
        "torch: every saved tensor offloaded",
        _save_on_cpu,
        why_not=_only_with_accelerator,
    ),
    Strategy(
        "trl-offload",
        "TRL: saved tensors offloaded in a stream of their own",
        _trl_offload,
        why_not=_trl,
    ),
    Strategy(
        "autosac",
        "torch: AutoSAC's integer program",
        auto_sac,
        heeds_budget=True,
        why_not=why_no_auto_sac,
    ),
    Strategy(
        "rockmate",
        "Rockmate: a schedule by integer programming",
        _unable,
        heeds_budget=True,
        why_not=_rockmate,
    ),
)
"""The peers."""
