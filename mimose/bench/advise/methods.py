"""The ways to train that `mimose advise` compares, and a model's training under one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimose.bench.advise.sample import Inputs, Sample, moved
from mimose.bench.device import is_cpu
from mimose.bench.step_meter import autocast, synchronise
from mimose.bench.usage import UsageError
from mimose.memory.meters import Meter
from mimose.planners import everywhere
from mimose.session import Session, attach

PLAIN = "plain"
"""The name of training without any method."""
PARTS = 4
"""The number of smaller batches into which accumulation splits a batch."""
DTYPES = ("float32", "bfloat16")
_LEARNING_RATE = 1e-6
_AMPLE_BYTES = 2**50
_BISECTIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    what: str
    """One line for people."""
    options: Mapping[str, Any] | None = None
    """Arguments of `mimose.attach`; None for training without a session."""
    edit: Callable[[nn.Module], None] = field(default=lambda _: None)
    """Changes the model before anything else."""
    parts: int = 1
    """The number of smaller batches into which it splits a batch."""
    is_exact: bool = True
    """Whether gradients are equal to plain training's, except for rounding."""
    plans: bool = False
    """Whether its plans depend on the budget."""
    why_not: Callable[[nn.Module, str], str] = field(default=lambda _, __: "")
    """Takes the model and the type of device; returns why it is impossible, or ""."""

    def is_exact_for(self, model: nn.Module) -> bool:
        """Whether it is exact for a model.

        Smaller batches are not, if layers compare samples; only batch norm is detected.
        """
        mixes = any(isinstance(each, _BatchNorm) for each in model.modules())
        return self.is_exact and not (self.parts > 1 and mixes)


def _everywhere(action: str, what: str, *, name: str = "", **others: Any) -> Method:
    options = {"actions": ("keep", action, "recompute"), "planner": everywhere(action)}
    return Method(name=name or action, what=what, options=options, **others)


def _use_sdpa(model: nn.Module) -> None:
    model.set_attn_implementation("sdpa")  # type: ignore[operator]


def _why_no_sdpa(model: nn.Module, _kind: str) -> str:
    config = getattr(model, "config", None)
    if not getattr(model, "_supports_sdpa", False):
        return "the model has no attention that could be switched"
    is_eager = getattr(config, "_attn_implementation", None) == "eager"
    return "" if is_eager else "the model's attention is fused already"


def _why_no_host(_model: nn.Module, kind: str) -> str:
    return "a model on a CPU is on the host already" if is_cpu(kind) else ""


METHODS: Mapping[str, Method] = {
    each.name: each
    for each in (
        Method(name=PLAIN, what="plain training: all that backward needs is kept"),
        Method(
            name="mimose",
            what="for each input size, as many layers as fit keep what backward needs; "
            "the others compute it a second time",
            options={"actions": "whole"},
            plans=True,
        ),
        Method(
            name="full",
            what="every layer computes a second time what backward needs",
            options={"planner": "full"},
        ),
        Method(
            name="every-2",
            what="every second layer computes a second time what backward needs",
            options={"planner": "every-2"},
        ),
        _everywhere(
            "selective",
            "every layer computes again what is cheap: no matrix products",
            name="selective",
        ),
        Method(
            name="accumulate",
            what=f"{PARTS} smaller batches, one by one, their gradients added up",
            parts=PARTS,
        ),
        Method(
            name="sdpa",
            what="plain training with fused attention, which keeps no matrix of it",
            edit=_use_sdpa,
            why_not=_why_no_sdpa,
        ),
        _everywhere(
            "offload",
            "what backward needs waits in the host's memory",
            why_not=_why_no_host,
        ),
        _everywhere(
            "pool",
            "part of what backward needs is averaged, two values to one",
            is_exact=False,
        ),
        _everywhere(
            "quantize", "what backward needs is held in 8 bits", is_exact=False
        ),
    )
}
"""Methods by name, in the order of measurements and reports. If time is short, the last
ones are left out."""

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=_LEARNING_RATE),
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=_LEARNING_RATE, momentum=0.9
    ),
}


class Training:
    """A model with its optimizer, trained with a method, until it is closed.

    Args:
        model: The model, on the CPU.
        sample: A batch for it.
        method: The method.
        device: The device to train on.
        optimizer: One of `OPTIMIZERS`.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.

    Attributes:
        session: The session that `attach` began; None without one.
        has_loss: Whether the model returned a loss in the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        method: Method,
        *,
        device: torch.device,
        optimizer: str,
        dtype: str = "float32",
    ) -> None:
        self.sample = Sample(sample)
        self.device = device
        self.session: Session | None = None
        self.has_loss = True
        self._method = method
        self._dtype = dtype
        method.edit(model)
        self._model = model.to(device).train()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = OPTIMIZERS[optimizer](trained)
        self._batches: dict[int, list[Inputs]] = {}

    def attach(self, budget_bytes: int | None, meter: Meter | None) -> None:
        """Begin the method's session, if it has one.

        Args:
            budget_bytes: The budget of methods that plan.
            meter: The session's meter; None for the default.

        Raises:
            MimoseError: The model cannot be planned for, or needs more than the budget
                before its first step.
        """
        if self._method.options is not None:
            self.session = attach(
                self._model,
                budget_bytes or _AMPLE_BYTES,
                meter=meter,
                on_infeasible="warn",
                refine=False,  # then everything is learned at the end of the step
                **self._method.options,
            )

    def step(self, batch: int) -> float:
        """Train on a batch of this size; return the seconds by the clock.

        It returns nan if the session made no plan and recomputed everything, because
        no plan keeps the budget or it trusts no prediction.
        """
        self._prepare(batch)
        synchronise(self.device)
        began = time.perf_counter()
        for inputs in self._batches[batch]:
            with autocast(self.device, self._dtype):
                output = self._model(*inputs.args, **inputs.kwargs)
            loss = loss_of(output)
            self.has_loss = loss.ndim == 0
            torch.autograd.backward(loss if self.has_loss else loss.float().mean())
            del output, loss
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        synchronise(self.device)
        seconds = time.perf_counter() - began
        return seconds if self._has_plan() else math.nan

    def least_budget(self) -> int:
        """Return the least budget that a plan keeps for the batch of the last step.

        Raises:
            UsageError: The session made no plan for it that keeps the budget.
        """
        low = self._least_peak(1) if self._has_plan() else 0
        if not low:
            msg = "its session made no plan that keeps the budget"
            raise UsageError(msg)
        high = 2 * low  # margins included
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            low, high = (middle, high) if self._least_peak(middle) else (low, middle)
        return high

    def _least_peak(self, budget_bytes: int) -> int:
        """Return the lowest peak of any plan; 0 if a plan keeps the budget."""
        assert self.session is not None
        found = self.session.forecast(budget=budget_bytes)
        return 0 if found.fits else int(found.peak_bytes or 0)

    def _has_plan(self) -> bool:
        """Whether the last step trained with the method."""
        phases = [] if self.session is None else [self.session.records[-1].phase]
        return not {"collect", "fallback"} & set(phases)

    def forget(self) -> None:
        """Drop gradients and batches, as after a step that failed."""
        self._optimizer.zero_grad(set_to_none=True)
        self._batches.clear()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def close(self) -> None:
        """Detach the session. A second call does nothing."""
        if self.session is not None:
            self.session.detach()

    def _prepare(self, batch: int) -> None:
        """Make a batch of this size on the device, and drop others."""
        if batch not in self._batches:
            self._batches.clear()
            parts = self._method.parts
            sizes = ((batch + index) // parts for index in range(parts))
            self._batches[batch] = [
                moved(self.sample.resized(size), self.device) for size in sizes if size
            ]


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output; without a loss, its first tensor.

    Raises:
        UsageError: This is not a floating-point tensor.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if loss is None:
        loss = output
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        msg = (
            f"the model returned {type(output).__name__} without a loss: put labels in "
            f"the sample, or return the loss from forward"
        )
        raise UsageError(msg)
    return loss
