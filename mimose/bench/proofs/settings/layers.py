"""Unusual layers, and unusual ways to call them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mimose.bench.proofs.settings.case import (
    ROWS,
    VOCABULARY,
    Training,
    World,
    setting,
)
from mimose.bench.proofs.settings.parts import (
    LAYERS,
    WIDTH,
    Block,
    Encoder,
    Residual,
    Scored,
    Stack,
    cross_entropy,
    next_token_loss,
)


def _language(world: World, model: nn.Module, **changes: Any) -> Training:
    """Train a model of tokens to logits to tell the next one."""
    model.to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        return world.descend(optimizer, next_token_loss(model(ids), ids))

    return Training(roots=[model], step=step, **changes)


def _with_layers(*layers: nn.Module) -> Scored:
    """Return a model with other layers."""
    model = Scored(layers=1)
    model.layers = nn.ModuleList(layers)
    return model


class _Widened(nn.Module):
    """Calls a layer that takes no mask.

    Args:
        inner: The layer.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor, _mask: None = None) -> torch.Tensor:
        """Run the layer with a residual."""
        given: torch.Tensor = self.inner(states)
        return states + given


# ------------------------------------------------------------------ which layers run


class _Dropped(Scored):
    """Skips whole layers at random, by a random number of Python's."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits."""
        states = self.embed(ids)
        for layer in self.layers:
            if not self.training or random.random() >= 0.2:
                states = layer(states, mask)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits


@setting("recomputed", "other layers ran than")
def layerdrop(world: World) -> Training:
    """LayerDrop: the model's loop skips layers at random."""
    return _language(world, _Dropped())


class _DropsItself(Block):
    """A layer that is the identity at random, decided inside."""

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run, or do not."""
        if self.training and torch.rand(()).item() < 0.2:
            return states
        return super().forward(states, mask)


@setting()
def layerdrop_inside(world: World) -> Training:
    """Stochastic depth: each layer decides inside whether it is the identity."""
    return _language(world, _with_layers(*(_DropsItself() for _ in range(LAYERS))))


class _DropsRows(Block):
    """A layer whose update is dropped for some rows of the batch."""

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run, and drop rows."""
        update = super().forward(states, mask) - states
        kept = torch.rand(len(states), 1, 1, device=states.device) >= 0.2
        return states + update * kept / 0.8


@setting()
def stochastic_depth(world: World) -> Training:
    """Stochastic depth: each layer drops its update for rows of the batch."""
    return _language(world, _with_layers(*(_DropsRows() for _ in range(LAYERS))))


class _LeavesEarly(Scored):
    """Runs as many layers as the first token says."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits."""
        states = self.embed(ids)
        most = 3 + int(ids[0, 0]) % 4
        for layer in self.layers[:most]:
            states = layer(states, mask)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits


@setting("recomputed", "other layers ran than")
def early_exit(world: World) -> Training:
    """Python decides by the batch's content how many layers run."""
    return _language(world, _LeavesEarly())


class _Looped(Scored):
    """One layer, run again and again."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits."""
        states = self.embed(ids)
        for _ in range(3):
            for layer in self.layers:
                states = layer(states, mask)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits


@setting()
def looped_layers(world: World) -> Training:
    """Universal transformer: two layers run three times each."""
    return _language(world, _Looped(layers=2))


# ------------------------------------------------------------------ experts


class _Experts(nn.Module):
    """The best two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
            for _ in range(4)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Route, run, add up."""
        flat = states.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            given = expert(flat[rows]) * weights[rows, place, None]
            output = output.index_add(0, rows, given)
        return output.view_as(states)


class _ExpertBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.experts = (
            Block(),
            nn.LayerNorm(WIDTH),
            _Experts(),
        )

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run both."""
        states = self.attention(states, mask)
        routed: torch.Tensor = self.experts(self.norm(states))
        return states + routed


@setting()
def experts(world: World) -> Training:
    """Mixture of experts: top 2 of 4 for each token, rows gathered by the routing."""
    return _language(world, _with_layers(*(_ExpertBlock() for _ in range(4))))


# ------------------------------------------------------------------ what layers take


class _Kept(nn.Module):
    """A layer that takes its states by keyword alone, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(
        self, *, hidden_states: torch.Tensor, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """Run."""
        return {"hidden_states": self.block(hidden_states, *extra["masks"])}


class _ByKeyword(Scored):
    """Calls layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Kept() for _ in range(LAYERS))

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits."""
        states = {"hidden_states": self.embed(ids)}
        for layer in self.layers:
            states = layer(extra={"masks": [mask]}, **states)
        logits: torch.Tensor = self.head(self.norm(states["hidden_states"]))
        return logits


@setting()
def keyword_states(world: World) -> Training:
    """Layers take states by keyword, nested arguments, and return dictionaries."""
    return _language(world, _ByKeyword())


@dataclass
class _Output:
    logits: torch.Tensor
    inner: tuple[torch.Tensor, ...]


class _Structured(Scored):
    """Nested inputs, a dataclass as output."""

    def forward(self, batch: dict[str, Any]) -> _Output:  # type: ignore[override]
        """Return logits and all inner states."""
        states, inner = self.embed(batch["texts"][0]), []
        for layer in self.layers:
            states = layer(states, batch["extra"]["mask"])
            inner.append(states)
        return _Output(self.head(self.norm(states)), tuple(inner))


@setting()
def nested_inputs(world: World) -> Training:
    """A dictionary of lists in, a dataclass out, a loss of the inner states as well."""
    model = _Structured().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        mask = ids[:, None, None, :] > 4
        said = model({"texts": [ids], "extra": {"mask": mask}})
        loss = next_token_loss(said.logits, ids)
        for inner in said.inner[:3]:
            loss = loss + 0.01 * inner.square().mean()
        return world.descend(optimizer, loss)

    return Training(roots=[model], step=step)


@setting()
def auxiliary_losses(world: World) -> Training:
    """Deep supervision: hooks take two inner layers' outputs into the loss."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    inner: list[torch.Tensor] = []
    for layer in (model.layers[1], model.layers[3]):
        layer.register_forward_hook(lambda _m, _i, output: inner.append(output))

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        inner.clear()
        loss = next_token_loss(model(ids), ids)
        for states in inner:
            loss = loss + 0.3 * next_token_loss(model.head(states), ids)
        inner.clear()
        return world.descend(optimizer, loss)

    return Training(roots=[model], step=step)


@setting()
def layer_hooks(world: World) -> Training:
    """Hooks on layers: before, after, one that changes the output, and in backward."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    counts: dict[str, int] = {"before": 0, "backward": 0}

    def count(name: str) -> None:
        counts[name] += 1

    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: count("before"))
        layer.register_forward_hook(lambda _m, _i, output: output * 1.001)
        layer.register_full_backward_hook(lambda *_: count("backward"))

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        loss = world.descend(optimizer, next_token_loss(model(ids), ids))
        return loss + counts["before"] + 1_000 * counts["backward"]

    return Training(roots=[model], step=step)


# ------------------------------------------------------------------ what layers do


class _Square(torch.autograd.Function):
    """Squares, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        """Square."""
        ctx.save_for_backward(given)
        return given.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return twice."""
        (given,) = ctx.saved_tensors
        slope: torch.Tensor = 2 * given * grad
        return slope


class _Squared(nn.Module):
    """A layer around an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Run."""
        wide = _Square.apply(functional.relu(self.up(states)))  # type: ignore[no-untyped-call]
        narrow: torch.Tensor = self.down(wide)
        return narrow


@setting()
def custom_function(world: World) -> Training:
    """Layers around a torch.autograd.Function of one's own."""
    model = _with_layers(*(_Widened(_Squared()) for _ in range(LAYERS)))
    return _language(world, model, lengths=(32, 160), multiple=8)


class _Fourier(nn.Module):
    """Filters in the frequency domain, by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Transform, multiply, transform back."""
        spectrum = torch.fft.rfft(states, dim=1) * self.weight
        back = torch.fft.irfft(spectrum, n=states.shape[1], dim=1)
        mixed: torch.Tensor = self.out(functional.gelu(back))
        return mixed


@setting()
def complex_numbers(world: World) -> Training:
    """Layers with Fourier transforms and complex weights."""
    model = _with_layers(*(_Widened(_Fourier()) for _ in range(LAYERS)))
    return _language(world, model, lengths=(64, 320), multiple=16)


class _CountsCalls(Block):
    """A layer that keeps running averages and counts of what it sees."""

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
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
    return _language(world, _with_layers(*(_CountsCalls() for _ in range(LAYERS))))


@setting()
def spectral_norm(world: World) -> Training:
    """Parametrised weights: spectral norm, whose buffers move in each forward."""
    model = Scored(dropout=0.0)
    layer: Any
    for layer in model.layers:
        nn.utils.parametrizations.spectral_norm(layer.up)
        nn.utils.parametrizations.weight_norm(layer.down)
    return _language(world, model)


class _Checkpointed(Block):
    """A layer that checkpoints a part of itself."""

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run, the feed-forward part under a checkpoint."""
        states = super().forward(states, mask)
        given: torch.Tensor = checkpoint(self._feed, states, use_reentrant=False)
        return states + given

    def _feed(self, states: torch.Tensor) -> torch.Tensor:
        wide = functional.gelu(self.up(self.after(states)))
        narrow: torch.Tensor = self.down(wide)
        return narrow


@setting()
def own_checkpoints(world: World) -> Training:
    """Layers that checkpoint a part of themselves."""
    return _language(world, _with_layers(*(_Checkpointed() for _ in range(LAYERS))))


class _InPlace(Block):
    """A layer that adds to its input in place."""

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run."""
        update = super().forward(states.clone(), mask)
        return states.add_(update)


@setting("recomputed")
def edits_in_place(world: World) -> Training:
    """Layers that add to their input in place: found, and kept."""
    model = _with_layers(*(_InPlace() for _ in range(LAYERS)))
    return _language(world, model)


class _Memory(Scored):
    """Carries detached states over from batch to batch.

    Args:
        is_full: Whether the first batch has a memory as well, of zeros.
    """

    memory: torch.Tensor | None

    def __init__(self, *, is_full: bool) -> None:
        super().__init__()
        memory = torch.zeros(ROWS, 8, WIDTH) if is_full else None
        self.register_buffer("memory", memory, persistent=False)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits of the batch's own tokens."""
        states = self.embed(ids)
        if self.memory is not None:
            states = torch.cat([self.memory, states], dim=1)
        for layer in self.layers:
            states = layer(states, mask)
        self.memory = states[:, -8:].detach()
        logits: torch.Tensor = self.head(self.norm(states[:, -ids.shape[1] :]))
        return logits


@setting()
def carried_memory(world: World) -> Training:
    """Truncated backpropagation: detached states are carried over; zeros at first."""
    return _language(world, _Memory(is_full=True), lengths=(16, 72))


@setting("recomputed", "do not follow from the batch's")
def carried_memory_from_none(world: World) -> Training:
    """Truncated backpropagation: the first batch has no memory, and is shorter."""
    return _language(world, _Memory(is_full=False), lengths=(16, 72))


class _Packed(Block):
    """Attention within each text of a packed row, a loop over the texts' ends."""

    def forward(  # type: ignore[override]
        self, states: torch.Tensor, ends: list[int]
    ) -> torch.Tensor:
        """Run each text by itself, in one tensor."""
        pieces = states.tensor_split(ends[:-1], dim=1)
        return torch.cat([super(_Packed, self).forward(p) for p in pieces], dim=1)


class _PackedModel(Scored):
    """One row of several texts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Packed() for _ in range(LAYERS))

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return logits."""
        states, cuts = self.embed(ids), ends.tolist()
        for layer in self.layers:
            states = layer(states, cuts)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits


def _ends(world: World, total: int) -> torch.Tensor:
    cuts = {world.number(1, total - 1) for _ in range(world.number(2, 5))}
    return torch.tensor([*sorted(cuts), total])


@setting()
def packed_own(world: World) -> Training:
    """Packed texts: one row, the texts' ends as a tensor, attention text by text."""
    model = _PackedModel().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length, 1)
        logits = model(ids, _ends(world, length))
        return world.descend(optimizer, next_token_loss(logits, ids))

    return Training(roots=[model], step=step, lengths=(128, 512), multiple=16)


class _Selects(Scored):
    """Leaves out padding before the layers: the number of rows depends on the data."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits of the tokens that are not padding."""
        del mask
        states = self.embed(ids)[ids > 8][None]
        for layer in self.layers:
            states = layer(states)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits


@setting("recomputed")
def rows_by_content(world: World) -> Training:
    """Padding is left out before the layers: how many rows there are depends on it."""
    model = _Selects().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length, 2)
        logits = model(ids)
        return world.descend(optimizer, cross_entropy(logits, ids[ids > 8][None]))

    return Training(roots=[model], step=step, lengths=(64, 160))


class _MaskedAutoencoder(nn.Module):
    """Encodes a quarter of the patches, decodes all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, WIDTH)
        self.encoder = Stack(*Encoder(LAYERS).layers)
        self.decoder = Stack(*Encoder(2).layers)
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the mean error of all patches."""
        rows, length, _ = patches.shape
        order = torch.rand(rows, length, device=patches.device).argsort(1)
        shown = order[:, : length // 4, None].expand(-1, -1, WIDTH)
        states = self.encoder(self.embed(patches).gather(1, shown))
        whole = self.hidden.expand(rows, length, WIDTH).scatter(1, shown, states)
        error: torch.Tensor = self.head(self.decoder(whole)) - patches
        return error.square().mean()


@setting()
def masked_autoencoder(world: World) -> Training:
    """MAE: a random quarter of the patches is encoded, all are decoded."""
    model = _MaskedAutoencoder().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, model(world.floats(ROWS, length, 48)))

    return Training(roots=[model], step=step, lengths=(32, 80))


# ------------------------------------------------------------------ other data


class _UNet(nn.Module):
    """Down, up, and skips between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList(Residual(16) for _ in range(3))
        self.middle = nn.ModuleList(Residual(16) for _ in range(2))
        self.up = nn.ModuleList(Residual(16) for _ in range(3))
        self.join = nn.ModuleList(nn.Conv2d(32, 16, 1) for _ in range(3))
        self.time = nn.Linear(1, 16)
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return an image."""
        states = self.first(image) + self.time(time)[:, :, None, None]
        skips = []
        for layer in self.down:
            states = layer(states)
            skips.append(states)
            states = functional.max_pool2d(states, 2)
        for layer in self.middle:
            states = layer(states)
        for layer, join in zip(self.up, self.join, strict=True):
            states = functional.interpolate(states, scale_factor=2.0)
            states = layer(join(torch.cat([states, skips.pop()], dim=1)))
        image = self.last(states)
        return image


@setting()
def diffusion_unet(world: World) -> Training:
    """Diffusion: a U-Net with skips and a time, images of changing sizes."""
    model = _UNet().to(world.device)
    optimizer = world.adamw(model)

    def step(size: int) -> torch.Tensor:
        image, noise = world.floats(4, 3, size, size), world.floats(4, 3, size, size)
        time = world.floats(4, 1).sigmoid()
        mixed = torch.lerp(image, noise, time[:, :, None, None])
        return world.descend(optimizer, (model(mixed, time) - noise).square().mean())

    return Training(roots=[model], step=step, lengths=(16, 56), multiple=8)


class _Images(nn.Module):
    """Residual blocks with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(Residual(16) for _ in range(6))
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        states = self.first(image)
        for layer in self.layers:
            states = layer(states)
        logits: torch.Tensor = self.head(states.mean((2, 3)))
        return logits


@setting()
def batch_norm(world: World) -> Training:
    """Images with batch normalization, mixed up two by two (mixup)."""
    model = _Images().to(world.device)
    optimizer = world.adamw(model)

    def step(size: int) -> torch.Tensor:
        image, labels = world.floats(4, 3, size, size), world.integers(10, 4)
        mixed = 0.7 * image + 0.3 * image.flip(0)
        logits = model(mixed)
        loss = 0.7 * functional.cross_entropy(logits, labels)
        loss = loss + 0.3 * functional.cross_entropy(logits, labels.flip(0))
        return world.descend(optimizer, loss)

    return Training(roots=[model], step=step, lengths=(16, 60))


class _Cells(nn.Module):
    """A recurrent layer: a loop over time, states held where a text has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 4 * WIDTH)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (rows, length, width)."""
        hidden = cell = torch.zeros_like(states[:, 0])
        outputs = []
        for now, is_there in zip(states.unbind(1), mask.unbind(1), strict=True):
            gates = self.gates(torch.cat([now, hidden], dim=-1)).chunk(4, dim=-1)
            opened, forgot, shown = map(torch.sigmoid, gates[:3])
            new = forgot * cell + opened * gates[3].tanh()
            cell = torch.where(is_there, new, cell)
            hidden = torch.where(is_there, shown * new.tanh(), hidden)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class _Recurrent(nn.Module):
    """A stack of recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Cells() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits, padded."""
        states = self.embed(ids)
        for layer in self.layers:
            states = layer(states, mask)
        logits: torch.Tensor = self.head(states)
        return logits


@setting()
def recurrent(world: World) -> Training:
    """LSTM cells of one's own: a loop over time within each layer, a mask of ends."""
    model = _Recurrent().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length, 16)
        ends = world.integers(length // 2, 16, 1) + length // 2
        mask = (torch.arange(length, device=ids.device)[None] <= ends)[..., None]
        return world.descend(optimizer, next_token_loss(model(ids, mask), ids))

    return Training(roots=[model], step=step, lengths=(16, 64))


class _Residuals1d(nn.Module):
    """A dilated convolution over time.

    Args:
        dilation: How far apart its taps are.
    """

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 64, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(32, 32, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return as many channels and samples as given."""
        inner = functional.glu(self.conv(states), dim=1)
        added: torch.Tensor = states + self.out(inner)
        return added


@setting()
def audio_convolutions(world: World) -> Training:
    """WaveNet: dilated 1-D convolutions over sound of changing lengths."""
    model = nn.Sequential(
        nn.Conv1d(1, 32, 1),
        *(_Residuals1d(2**n) for n in range(6)),
        nn.Conv1d(32, 1, 1),
    ).to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        sound = world.floats(4, 1, length)
        error = model(sound)[..., :-1] - sound[..., 1:]
        return world.descend(optimizer, error.square().mean())

    return Training(roots=[model], step=step, lengths=(256, 1920), multiple=64)


class _Recommender(nn.Module):
    """Bags of items to a score, through residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(200, WIDTH, mode="mean")
        self.layers = nn.ModuleList(
            _Widened(
                nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))
            )
            for _ in range(6)
        )
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return a score for each bag."""
        states = self.bag(items, offsets)
        for layer in self.layers:
            states = layer(states)
        scores: torch.Tensor = self.score(states)
        return scores


@setting()
def recommender(world: World) -> Training:
    """Recommender: bags of items with offsets, as many users as the batch has."""
    model = _Recommender().to(world.device)
    optimizer = world.adamw(model)

    def step(users: int) -> torch.Tensor:
        offsets = torch.arange(0, 5 * users, 5, device=world.device)
        scores = model(world.integers(200, 5 * users), offsets)
        return world.descend(optimizer, (scores - 1).square().mean())

    return Training(roots=[model], step=step, lengths=(256, 1600), multiple=64)


class _Messages(nn.Module):
    """Sends messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return nodes (n_nodes, width), given edges (2, n_edges)."""
        source, target = edges
        both = torch.cat([nodes[source], nodes[target]], dim=1)
        sent = functional.relu(self.message(both))
        given = torch.zeros_like(nodes).index_add(0, target, sent)
        updated: torch.Tensor = nodes + self.update(given)
        return updated


class _Graphs(nn.Module):
    """A graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Messages() for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return a number for each node."""
        for layer in self.layers:
            nodes = layer(nodes, edges)
        numbers: torch.Tensor = self.head(nodes)
        return numbers


@setting()
def graph_network(world: World) -> Training:
    """Graph network: nodes and edges change in number, each by its own."""
    model = _Graphs().to(world.device)
    optimizer = world.adamw(model)

    def step(n_nodes: int) -> torch.Tensor:
        n_edges = world.number(3 * n_nodes, 4 * n_nodes)
        edges = world.integers(n_nodes, 2, n_edges)
        numbers = model(world.floats(n_nodes, WIDTH), edges)
        return world.descend(optimizer, (numbers - 1).square().mean())

    return Training(roots=[model], step=step, lengths=(64, 480), multiple=16)
