"""What is trained on a device: models, lengths that jump, and a budget between."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.check.model import Transformer, make_batch
from benchmarks.proofs.loop import Loop
from mimose.bench.step_meter import MeasuredStep, ReservedStepMeter
from mimose.bench.zoo import ZOO, Batch, moved

_SEED = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is trained."""

    batch: int
    width: int
    heads: int
    lengths: tuple[int, int]
    """The shortest and the longest."""
    layers: int = 8


_SIMULATED = Scale(8, 64, 4, (24, 192))
_CARD = Scale(16, 256, 4, (64, 768))
"""Two GiB of activations."""


def scale_of(device: torch.device) -> Scale:
    """Return what suits a device: the simulated one computes on the CPU."""
    return _SIMULATED if device.type == "sim" else _CARD


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to train."""

    name: str
    build: Callable[[Scale], nn.Module]
    batch: Callable[[Scale, int, torch.Generator], Batch]
    """Makes a batch of some length."""


def _transformer(scale: Scale, *, is_fused: bool) -> nn.Module:
    sizes = scale.width, scale.heads, scale.layers, scale.lengths[1]
    return Transformer(*sizes, is_fused=is_fused)


def _unpadded(scale: Scale, length: int, generator: torch.Generator) -> Batch:
    return make_batch(scale.batch, length, generator, is_padded=False)


def _padded(scale: Scale, length: int, generator: torch.Generator) -> Batch:
    return make_batch(scale.batch, length, generator, is_padded=True)


def _bert(scale: Scale) -> nn.Module:
    return ZOO["bert"].build(
        hidden_size=scale.width,
        intermediate_size=4 * scale.width,
        num_attention_heads=scale.heads,
        num_hidden_layers=scale.layers,
        max_position_embeddings=scale.lengths[1],
    )


def _bert_batch(scale: Scale, length: int, generator: torch.Generator) -> Batch:
    return ZOO["bert"].batch({"batch": scale.batch, "length": length}, generator)


FUSED = Subject("transformer", lambda s: _transformer(s, is_fused=True), _unpadded)
EAGER = Subject(
    "transformer, eager attention",
    lambda scale: _transformer(scale, is_fused=False),
    _unpadded,
)
PADDED = Subject("transformer, padded", FUSED.build, _padded)
_BERT = Subject("BERT of transformers", _bert, _bert_batch)


def subjects() -> Sequence[Subject]:
    """Return the models there are: one of the zoo's where transformers is installed."""
    has_zoo = importlib.util.find_spec("transformers") is not None
    return (FUSED, _BERT) if has_zoo else (FUSED,)


def jumping(scale: Scale, steps: int, seed: int = _SEED) -> list[int]:
    """Draw lengths; the longest is one of the last ten, and the last."""
    low, high = scale.lengths
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(low, high + 1, (steps,), generator=generator).tolist()
    for place in (-min(10, steps), -1):
        drawn[place] = high
    return [int(length) for length in drawn]


def bare(device: torch.device, lengths: Sequence[int]) -> tuple[nn.Module, list[Batch]]:
    """Return a model and batches on a device, without a loop."""
    torch.manual_seed(_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    scale = scale_of(device)
    batches = [moved(FUSED.batch(scale, n, generator), device) for n in lengths]
    return FUSED.build(scale).to(device), batches


def run_once(model: nn.Module, batch: Batch) -> None:
    """Run a forward and a backward, and forget the gradients."""
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)


class DeviceLoop(Loop):
    """A model on an accelerator, its batches, its loop; under autocast if asked for."""

    def __init__(
        self,
        device: torch.device,
        subject: Subject = FUSED,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(_SEED)
        self.scale = scale_of(device)
        super().__init__(subject.build(self.scale).train().to(device))
        assert isinstance(self.meter, ReservedStepMeter)
        self.reserved: ReservedStepMeter = self.meter
        self._subject = subject
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(_SEED)
        self.run: Callable[[Callable[[], object]], object] = _once
        """Runs each step's forward and backward, such as `Session.step`."""

    def forward_and_backward(self, batch: Batch) -> None:
        """Run one step without the optimizer's."""
        self.run(lambda: self.loss(batch).backward())  # type: ignore[no-untyped-call]

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run a forward."""
        is_on = self._dtype is not None
        with torch.autocast(self.device.type, self._dtype, enabled=is_on):
            return super().loss(batch)

    def batch(self, length: int, like: Subject | None = None) -> Batch:
        """Make the next batch, as for another subject of the same model if asked to."""
        make = (like or self._subject).batch
        return make(self.scale, length, self._generator)

    def train(self, lengths: Iterable[int]) -> Iterator[MeasuredStep]:
        """Train a step at each length."""
        return (self.step(self.batch(length)) for length in lengths)

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the weights."""
        return [each.detach().clone() for each in self.model.parameters()]


def _once(step: Callable[[], object]) -> object:
    return step()


class Room(NamedTuple):
    """What a device holds between steps, and what the longest step takes over that."""

    base_bytes: int
    """Reserved with the optimizer's state there, no free blocks, no gradients."""
    growth_bytes: int
    """Of reserved bytes, in plain training."""

    def budget(self, share: float) -> int:
        """Return the budget that leaves a share of the growth."""
        return self.base_bytes + round(share * self.growth_bytes)

    def used(self, peak_bytes: int | None, budget_bytes: int) -> float:
        """Return a peak's part of the growth that a budget leaves."""
        taken = (peak_bytes or 0) - self.base_bytes
        return taken / (budget_bytes - self.base_bytes)


def measure_room(training: DeviceLoop) -> Room:
    """Train two short steps and two of the longest without a session."""
    low, high = training.scale.lengths
    list(training.train((low, low, high)))
    base_bytes = training.reserved.resting_bytes()
    (measured,) = training.train((high,))
    training.reserved.give_back()
    return Room(base_bytes, measured.peak_bytes - base_bytes)
