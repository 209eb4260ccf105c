"""The model of the checks: a small transformer of only torch's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.proofs.loop import Loop
from mimose.bench.step_meter import MeasuredStep, ReservedStepMeter
from mimose.bench.zoo import Batch, Output

_SEED = 0
_VOCABULARY, _CLASSES, _HEADS, _LAYERS, _DROPOUT = 512, 8, 4, 8, 0.1


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is trained."""

    batch: int
    width: int
    lengths: tuple[int, int]
    """The shortest and the longest."""


def scale_of(device: torch.device) -> Scale:
    """Return what suits a device: the simulated one computes on the CPU.

    On a card it is two GiB of activations.
    """
    if device.type == "sim":
        return Scale(4, 64, (24, 192))
    return Scale(16, 256, (64, 768))


class Transformer(nn.Module):
    """Embeddings, layers, a classifier on the mean of the states."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        width = scale.width
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.places = nn.Embedding(scale.lengths[1], width)
        kind = nn.TransformerEncoderLayer
        how: Any = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            kind(width, _HEADS, 4 * width, _DROPOUT, **how) for _ in range(_LAYERS)
        )
        self.classifier = nn.Linear(width, _CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        """Map tokens to the loss of their classes."""
        states = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for layer in self.layers:
            states = layer(states)
        classes = self.classifier(states.mean(1))
        return Output(loss=functional.cross_entropy(classes, labels))


def jumping(scale: Scale, steps: int) -> list[int]:
    """Draw lengths; the longest is one of the last ten, and the last."""
    low, high = scale.lengths
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(low, high + 1, (steps,), generator=generator).tolist()
    for place in (-min(10, steps), -1):
        drawn[place] = high
    return [int(length) for length in drawn]


class DeviceLoop(Loop):
    """A model on an accelerator, its batches, its loop; under autocast if asked for."""

    def __init__(
        self, device: torch.device, *, dtype: torch.dtype | None = None
    ) -> None:
        torch.manual_seed(_SEED)
        self.scale = scale_of(device)
        super().__init__(Transformer(self.scale).to(device))
        assert isinstance(self.meter, ReservedStepMeter)
        self.reserved: ReservedStepMeter = self.meter
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(_SEED)
        self.run: Callable[[Callable[[], object]], object] = lambda step: step()
        """Runs each step's forward and backward, such as `Session.step`."""

    def forward_and_backward(self, batch: Batch) -> None:
        """Run one step without the optimizer's."""
        self.run(lambda: self.loss(batch).backward())  # type: ignore[no-untyped-call]

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run a forward."""
        is_on = self._dtype is not None
        with torch.autocast(self.device.type, self._dtype, enabled=is_on):
            return super().loss(batch)

    def batch(self, length: int) -> Batch:
        """Make a batch."""
        rows, generator = self.scale.batch, self._generator
        ids = torch.randint(_VOCABULARY, (rows, length), generator=generator)
        labels = torch.randint(_CLASSES, (rows,), generator=generator)
        return {"input_ids": ids, "labels": labels}

    def train(self, lengths: Iterable[int]) -> Iterator[MeasuredStep]:
        """Train a step at each length."""
        return (self.step(self.batch(length)) for length in lengths)

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the weights."""
        return [each.detach().clone() for each in self.model.parameters()]


def measure_headroom(training: DeviceLoop) -> tuple[int, int]:
    """Train two short steps and two of the longest without a session.

    Returns:
        The bytes reserved between steps, with the optimizer's state and no cached
        blocks, and by how many plain training grows over that.
    """
    low, high = training.scale.lengths
    list(training.train((low, low, high)))
    base_bytes = training.reserved.resting_bytes()
    (measured,) = training.train((high,))
    torch.accelerator.empty_cache()
    return base_bytes, measured.peak_bytes - base_bytes
