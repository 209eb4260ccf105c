"""What layers do that is out of the ordinary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs.settings.case import ROWS, Training, World, setting
from benchmarks.proofs.settings.parts import (
    LAYERS,
    WIDTH,
    Block,
    Encoder,
    Scored,
    Stack,
    Widened,
    cross_entropy,
    language,
    next_token_loss,
    with_layers,
)


class _Square(torch.autograd.Function):
    """Squares, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(given)
        return given.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return twice."""
        (given,) = ctx.saved_tensors
        slope: Tensor = 2 * given * grad
        return slope


class _Squared(nn.Module):
    """A layer around an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        """Run."""
        wide = _Square.apply(functional.relu(self.up(states)))  # type: ignore[no-untyped-call]
        narrow: Tensor = self.down(wide)
        return narrow


@setting()
def custom_function(world: World) -> Training:
    """Layers around a torch.autograd.Function of one's own."""
    model = with_layers(*(Widened(_Squared()) for _ in range(LAYERS)))
    return language(world, model, lengths=(32, 160), multiple=8)


class _Fourier(nn.Module):
    """Filters in the frequency domain, by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        """Transform, multiply, transform back."""
        spectrum = torch.fft.rfft(states, dim=1) * self.weight
        back = torch.fft.irfft(spectrum, n=states.shape[1], dim=1)
        mixed: Tensor = self.out(functional.gelu(back))
        return mixed


@setting()
def complex_numbers(world: World) -> Training:
    """Layers with Fourier transforms and complex weights."""
    model = with_layers(*(Widened(_Fourier()) for _ in range(LAYERS)))
    return language(world, model, lengths=(64, 320), multiple=16)


class _CountsCalls(Block):
    """A layer that keeps running averages and counts of what it sees."""

    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Quantise by an observed scale, and pass gradients straight through."""
        if self.training:
            self.calls += 1
            self.seen += 1
            self.scale = 0.9 * self.scale + 0.1 * states.detach().abs().max()
        steps = (states / self.scale * 127).round() / 127 * self.scale
        return super().forward(states + (steps - states).detach(), mask)


@setting()
def quantisation_aware(world: World) -> Training:
    """Fake quantisation: layers observe a running scale and count their calls."""
    return language(world, with_layers(*(_CountsCalls() for _ in range(LAYERS))))


@setting()
def spectral_norm(world: World) -> Training:
    """Parametrised weights: spectral norm, whose buffers move in each forward."""
    model = Scored(dropout=0.0)
    layer: Any
    for layer in model.layers:
        nn.utils.parametrizations.spectral_norm(layer.up)
        nn.utils.parametrizations.weight_norm(layer.down)
    return language(world, model)


class _Checkpointed(Block):
    """A layer that checkpoints a part of itself."""

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run, the feed-forward part under a checkpoint."""
        states = super().forward(states, mask)
        given: Tensor = checkpoint(self._feed, states, use_reentrant=False)
        return states + given

    def _feed(self, states: Tensor) -> Tensor:
        wide = functional.gelu(self.up(self.after(states)))
        narrow: Tensor = self.down(wide)
        return narrow


@setting()
def own_checkpoints(world: World) -> Training:
    """Layers that checkpoint a part of themselves."""
    return language(world, with_layers(*(_Checkpointed() for _ in range(LAYERS))))


class _InPlace(Block):
    """A layer that adds to its input in place."""

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run."""
        update = super().forward(states.clone(), mask)
        return states.add_(update)


@setting("recomputed")
def edits_in_place(world: World) -> Training:
    """Layers that add to their input in place: found, and kept."""
    model = with_layers(*(_InPlace() for _ in range(LAYERS)))
    return language(world, model)


class _Memory(Scored):
    """Carries detached states over from batch to batch.

    Args:
        is_full: Whether the first batch has a memory as well, of zeros.
    """

    memory: Tensor | None

    def __init__(self, *, is_full: bool) -> None:
        super().__init__()
        memory = torch.zeros(ROWS, 8, WIDTH) if is_full else None
        self.register_buffer("memory", memory, persistent=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits of the batch's own tokens."""
        states = self.embed(ids)
        if self.memory is not None:
            states = torch.cat([self.memory, states], dim=1)
        states = self.run(states, mask)
        self.memory = states[:, -8:].detach()
        return self.read(states[:, -ids.shape[1] :])


@setting()
def carried_memory(world: World) -> Training:
    """Truncated backpropagation: detached states are carried over; zeros at first."""
    return language(world, _Memory(is_full=True), lengths=(16, 72))


@setting("recomputed", "do not follow from the batch's")
def carried_memory_from_none(world: World) -> Training:
    """Truncated backpropagation: the first batch has no memory, and is shorter."""
    return language(world, _Memory(is_full=False), lengths=(16, 72))


class _Packed(Block):
    """Attention within each text of a packed row, a loop over the texts' ends."""

    def forward(  # type: ignore[override]
        self, states: Tensor, ends: list[int]
    ) -> Tensor:
        """Run each text by itself, in one tensor."""
        pieces = states.tensor_split(ends[:-1], dim=1)
        return torch.cat([super(_Packed, self).forward(p) for p in pieces], dim=1)


class _PackedModel(Scored):
    """One row of several texts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Packed() for _ in range(LAYERS))

    def forward(  # type: ignore[override]
        self, ids: Tensor, ends: Tensor
    ) -> Tensor:
        """Return logits."""
        return self.read(self.run(self.embed(ids), ends.tolist()))


def _ends(world: World, total: int) -> Tensor:
    cuts = {world.number(1, total - 1) for _ in range(world.number(2, 5))}
    return torch.tensor([*sorted(cuts), total])


@setting()
def packed_own(world: World) -> Training:
    """Packed texts: one row, the texts' ends as a tensor, attention text by text."""
    model = _PackedModel()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, 1)
        logits = model(ids, _ends(world, length))
        return next_token_loss(logits, ids)

    return world.train(model, loss, lengths=(128, 512), multiple=16)


class _Selects(Scored):
    """Leaves out padding before the layers: the number of rows depends on the data."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits of the tokens that are not padding."""
        del mask
        return self.read(self.run(self.embed(ids)[ids > 8][None]))


@setting("recomputed")
def rows_by_content(world: World) -> Training:
    """Padding is left out before the layers: how many rows there are depends on it."""
    model = _Selects()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, 2)
        logits = model(ids)
        return cross_entropy(logits, ids[ids > 8][None])

    return world.train(model, loss, lengths=(64, 160))


class _MaskedAutoencoder(nn.Module):
    """Encodes a quarter of the patches, decodes all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, WIDTH)
        self.encoder = Stack(*Encoder(LAYERS).layers)
        self.decoder = Stack(*Encoder(2).layers)
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, patches: Tensor) -> Tensor:
        """Return the mean error of all patches."""
        rows, length, _ = patches.shape
        order = torch.rand(rows, length, device=patches.device).argsort(1)
        shown = order[:, : length // 4, None].expand(-1, -1, WIDTH)
        states = self.encoder(self.embed(patches).gather(1, shown))
        whole = self.hidden.expand(rows, length, WIDTH).scatter(1, shown, states)
        error: Tensor = self.head(self.decoder(whole)) - patches
        return error.square().mean()


@setting()
def masked_autoencoder(world: World) -> Training:
    """MAE: a random quarter of the patches is encoded, all are decoded."""
    model = _MaskedAutoencoder()

    def loss(length: int) -> Any:
        return model(world.floats(ROWS, length, 48))

    return world.train(model, loss, lengths=(32, 80))
