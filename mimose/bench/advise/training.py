"""Training a model under one method, at any batch size and length."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.bench.advise.methods import Method
from mimose.bench.advise.sample import Inputs, Sample, moved
from mimose.bench.exploring import Exploring
from mimose.measure.meters import Meter
from mimose.session import Session, attach
from mimose.usage import UsageError

_LEARNING_RATE = 1e-6
_AMPLE_BYTES = 2**50


class Point(NamedTuple):
    """Sizes of a batch."""

    batch: int
    length: int | None = None
    """Tokens; None for the sample's own."""


DTYPES = ("float32", "bfloat16")
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=_LEARNING_RATE),
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=_LEARNING_RATE, momentum=0.9
    ),
}


class Training:
    """A model with its optimizer, under a method, until it is closed.

    Args:
        model: On the CPU.
        sample: A batch of it.
        method: How to train.
        device: Where to.
        optimizer: One of `OPTIMIZERS`.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.

    Attributes:
        session: Once `attach` has begun one.
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
        self._method = method
        self._dtype = dtype
        method.edit(model)
        self._model = model.to(device).train()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = OPTIMIZERS[optimizer](trained)
        self._batches: dict[Point, list[Inputs]] = {}
        self._has_loss = True

    def attach(
        self, budget_bytes: int | None, meter: Meter | None, *, refine: bool = True
    ) -> None:
        """Begin the method's session, if it has one.

        Args:
            budget_bytes: For methods that plan.
            meter: Where the session reads memory; None for one of its own.
            refine: Whether it learns in a thread, as a user's does.

        Raises:
            MimoseError: The model cannot be planned for, or needs more than the budget
                before its first step.
        """
        options = self._method.options
        if options is not None:
            self.session = attach(
                self._model,
                budget_bytes or _AMPLE_BYTES,
                meter=meter,
                on_infeasible="warn",
                refine=refine,
                **options,
            )

    def explore(
        self, points: Sequence[Point], passes: int, meter: Meter | None, seed: int
    ) -> tuple[Mapping[str, Any], Mapping[Point, Mapping[str, int]]]:
        """Let a session of its own learn all actions, under plans by chance.

        Returns:
            Its state, and the shape of each point.
        """
        options = {**(self._method.options or {}), "planner": Exploring(seed)}
        options["refine"] = False  # all is learned when the step has ended
        shapes = {}
        with attach(self._model, _AMPLE_BYTES, meter=meter, **options) as session:
            for _ in range(passes):
                for point in points:
                    self.step(point)
                    shapes[point] = session.records[-1].shape
            return session.state_dict(), shapes

    def prepare(self, point: Point) -> None:
        """Have a batch of these sizes ready on the device, and no other."""
        if point not in self._batches:
            self._batches.clear()
            self._batches[point] = [
                moved(self.sample.resized(size, point.length), self.device)
                for size in _parts(point.batch, self._method.parts)
            ]

    def step(self, point: Point) -> float:
        """Train on a batch of these sizes; return the seconds by the clock.

        Not a number where a session made no plan, and recomputed everything: its budget
        cannot be kept there, or it trusts no prediction. Such seconds are no method's.
        """
        self.prepare(point)
        self._synchronise()
        began = time.perf_counter()
        for inputs in self._batches[point]:
            with self._autocast():
                output = self._model(*inputs.args, **inputs.kwargs)
            loss = loss_of(output)
            self._has_loss = loss.ndim == 0
            torch.autograd.backward(loss if self._has_loss else loss.float().mean())
            del output, loss
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._synchronise()
        seconds = time.perf_counter() - began
        return seconds if self._has_plan else math.nan

    @property
    def _has_plan(self) -> bool:
        """Whether the last step did what the method does."""
        if self.session is None:
            return True
        return self.session.records[-1].phase not in ("collect", "fallback")

    def notes(self) -> list[str]:
        """Return what the user should know of how it is trained."""
        found = self.sample.notes()
        if not self._has_loss:
            found.append(
                "the model returns no loss, so the mean of its output was trained: "
                "what a loss of yours holds and takes is not in these numbers (return "
                "it from forward, or put labels in the sample)"
            )
        return found

    def forget(self) -> None:
        """Drop gradients and batches, as after a step that failed."""
        self._optimizer.zero_grad(set_to_none=True)
        self._batches.clear()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def close(self) -> None:
        """Detach the session; harmless twice."""
        if self.session is not None:
            self.session.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self._dtype))

    def _synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def loss_of(output: Any) -> torch.Tensor:
    """Return what a model's output is trained by: its loss, or all of its first tensor.

    Raises:
        UsageError: There is no tensor of floating point in it.
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


def _parts(batch: int, parts: int) -> Iterator[int]:
    """Yield sizes of at most so many parts, as equal as can be."""
    for index in range(parts):
        size = (batch + index) // parts
        if size:
            yield size
