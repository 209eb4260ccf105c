"""What a simulated device cannot run, said before it is tried."""

from __future__ import annotations

import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mimose.bench.child import RunFailedError
from mimose.tensors import tensors_in

_SDPA = (
    "let torch's own attention run in its place (attn_implementation='sdpa'): it holds "
    "the same bytes, and its time is that of the card's peak"
)
_INSTEAD: Mapping[str, str] = {
    "flash_attn": _SDPA,
    "kernels": _SDPA,
    "xformers": _SDPA,
    "liger_kernel": (
        "leave it out: the bytes of its fused loss are then those of all logits, or "
        "less where mimose computes the loss by rows"
    ),
    "bitsandbytes": (
        "build the model in bfloat16 and take torch's optimizer: weights then take 4 "
        "times (4 bits) or twice the bytes, an 8-bit optimizer's state 4 times"
    ),
    "triton": "switch the kernel off for the rehearsal: see its package",
    "apex": "take torch's own layers and optimizers: they hold the same bytes",
    "transformer_engine": "take torch's own layers, in bfloat16 for FP8",
    "deepspeed": "shard with torch's fully_shard in its place",
    "mamba_ssm": "its slow path in torch holds more bytes: there is no near one",
    "causal_conv1d": "take nn.Conv1d in its place: it holds the same bytes",
    "unsloth": "build the model with transformers in its place",
}
"""Packages that bring kernels, and what to do for the rehearsal."""
NESTED = (
    "the sizes of its rows are values, which a simulated card does not compute: pad it "
    "for the rehearsal, which then holds as many bytes or more"
)
_WAYS: Mapping[str, str] = {
    "CUDAGraph|/torch/cuda/graphs.py": (
        "a simulated card captures no CUDA graph, and no session plans a captured "
        "step: leave torch.cuda.graph and make_graphed_callables out"
    ),
    "The hollow device cannot run": (
        "numbers are not computed. If a size depends on some (x[mask], nonzero, "
        "unique), let it be fixed for the rehearsal: keep all rows and multiply by "
        "the mask, or pad"
    ),
    "/torch/nested/|NestedTensor": NESTED,
}
"""What a traceback holds, either of them, and what to do then."""
_OWN = str(Path(__file__).resolve().parents[2])
_SIZES = "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"
"""Operators whose results have sizes that depend on values."""


def instead_of(package: str) -> str:
    """Return what to do without a package whose kernels are not torch's."""
    return f"{package} has kernels outside of torch: {_INSTEAD[package]}"


def raise_if_foreign(model: nn.Module, optimizer: object | None) -> None:
    """Make sure that a model and its optimizer run by torch's kernels alone.

    Raises:
        RunFailedError: They do not; the message says what to do.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        forward = inspect.unwrap(module.forward)
        for where in (type(module).__module__, getattr(forward, "__module__", "")):
            found.setdefault((where or "").partition(".")[0], name or "the model")
        if module._compiled_call_impl is not None or "OptimizedModule" in str(
            type(module)
        ):
            msg = f"{name or 'the model'} is compiled, and a simulated device has no "
            msg += "compiler: leave compile out for the rehearsal"
            raise RunFailedError(msg)
    found.setdefault(type(optimizer).__module__.partition(".")[0], "the optimizer")
    for package in _INSTEAD:
        if package in found:
            msg = f"{found[package]} cannot be rehearsed: {instead_of(package)}"
            raise RunFailedError(msg)


def named_in(error: BaseException) -> str:
    """Return advice if an error shows what a simulated device has not; "" if not.

    That is a package with kernels, CUDA graphs, or values.
    """
    lines = "".join(traceback.format_exception(error))
    for package in _INSTEAD:
        if f"/{package}/" in lines or f"'{package}'" in lines:
            return f". {instead_of(package)}"
    if "flash_attention" in lines or "FlashAttention" in lines:
        return f". {instead_of('flash_attn')}"
    for marks, advice in _WAYS.items():
        if any(mark in lines for mark in marks.split("|")):
            place = _place(traceback.extract_tb(error.__traceback__))
            return f" ({place}): {advice}" if place else f": {advice}"
    return ""


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the last line of the user's own code; "" if there is none."""
    for frame in reversed(frames):
        if "/torch/" not in frame.filename and _OWN not in frame.filename:
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes who reads numbers that a simulated device does not compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, str] = {}
        self._follows = weakref.WeakValueDictionary[int, torch.Tensor]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        given = list(tensors_in([args, kwargs or {}]))
        computed = [
            t for t in given if t.is_floating_point() or self._follows.get(id(t)) is t
        ]
        if name == "_local_scalar_dense" and computed:
            self._note("reads a number, which is 0 here")
        if name in _SIZES or (
            name == "index" and any(t.dtype is torch.bool for t in given)
        ):
            self._note(f"makes a tensor whose size depends on values ({name})")
        out = func(*args, **(kwargs or {}))
        if computed:
            for made in tensors_in(out):
                if not made.is_floating_point():
                    self._follows[id(made)] = made
        return out

    def _note(self, what: str) -> None:
        if place := _place(traceback.extract_stack()):
            self.places.setdefault(place, what)


def values_read(forward: Callable[[], object]) -> Iterator[str]:
    """Yield where a forward depends on numbers that are not computed.

    Args:
        forward: Runs it.
    """
    with torch.no_grad(), _Watch() as watch:
        forward()
    for place, what in watch.places.items():
        yield f"{place} {what}: other numbers may take another way on a card"
