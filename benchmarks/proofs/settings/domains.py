"""Other data than texts: images, sound, items, graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.proofs.settings.case import VOCABULARY, Training, World, setting
from benchmarks.proofs.settings.parts import WIDTH, Residual, Widened, next_token_loss


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

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
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
    model = _UNet()

    def loss(size: int) -> Any:
        image, noise = world.floats(4, 3, size, size), world.floats(4, 3, size, size)
        time = world.floats(4, 1).sigmoid()
        mixed = torch.lerp(image, noise, time[:, :, None, None])
        return (model(mixed, time) - noise).square().mean()

    return world.train(model, loss, lengths=(16, 56), multiple=8)


class _Images(nn.Module):
    """Residual blocks with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(Residual(16) for _ in range(6))
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        states = self.first(image)
        for layer in self.layers:
            states = layer(states)
        logits: Tensor = self.head(states.mean((2, 3)))
        return logits


@setting()
def batch_norm(world: World) -> Training:
    """Images with batch normalization, mixed up two by two (mixup)."""
    model = _Images()

    def loss(size: int) -> Tensor:
        image, labels = world.floats(4, 3, size, size), world.integers(10, 4)
        mixed = 0.7 * image + 0.3 * image.flip(0)
        logits = model(mixed)
        loss = 0.7 * functional.cross_entropy(logits, labels)
        return loss + 0.3 * functional.cross_entropy(logits, labels.flip(0))

    return world.train(model, loss, lengths=(16, 60))


class _Cells(nn.Module):
    """A recurrent layer: a loop over time, states held where a text has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 4 * WIDTH)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
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

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits, padded."""
        states = self.embed(ids)
        for layer in self.layers:
            states = layer(states, mask)
        logits: Tensor = self.head(states)
        return logits


@setting()
def recurrent(world: World) -> Training:
    """LSTM cells of one's own: a loop over time within each layer, a mask of ends."""
    model = _Recurrent()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, 16)
        ends = world.integers(length // 2, 16, 1) + length // 2
        mask = (torch.arange(length, device=ids.device)[None] <= ends)[..., None]
        return next_token_loss(model(ids, mask), ids)

    return world.train(model, loss, lengths=(16, 64))


class _Residuals1d(nn.Module):
    """A dilated convolution over time."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 64, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(32, 32, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Return as many channels and samples as given."""
        inner = functional.glu(self.conv(states), dim=1)
        added: Tensor = states + self.out(inner)
        return added


@setting()
def audio_convolutions(world: World) -> Training:
    """WaveNet: dilated 1-D convolutions over sound of changing lengths."""
    model = nn.Sequential(
        nn.Conv1d(1, 32, 1),
        *(_Residuals1d(2**n) for n in range(6)),
        nn.Conv1d(32, 1, 1),
    ).to(world.device)

    def loss(length: int) -> Any:
        sound = world.floats(4, 1, length)
        error = model(sound)[..., :-1] - sound[..., 1:]
        return error.square().mean()

    return world.train(model, loss, lengths=(256, 1920), multiple=64)


class _Recommender(nn.Module):
    """Bags of items to a score, through residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(200, WIDTH, mode="mean")
        self.layers = nn.ModuleList(
            Widened(
                nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))
            )
            for _ in range(6)
        )
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        """Return a score for each bag."""
        states = self.bag(items, offsets)
        for layer in self.layers:
            states = layer(states)
        scores: Tensor = self.score(states)
        return scores


@setting()
def recommender(world: World) -> Training:
    """Recommender: bags of items with offsets, as many users as the batch has."""
    model = _Recommender()

    def loss(users: int) -> Any:
        offsets = torch.arange(0, 5 * users, 5, device=world.device)
        scores = model(world.integers(200, 5 * users), offsets)
        return (scores - 1).square().mean()

    return world.train(model, loss, lengths=(256, 1600), multiple=64)


class _Messages(nn.Module):
    """Sends messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return nodes (n_nodes, width), given edges (2, n_edges)."""
        source, target = edges
        both = torch.cat([nodes[source], nodes[target]], dim=1)
        sent = functional.relu(self.message(both))
        given = torch.zeros_like(nodes).index_add(0, target, sent)
        updated: Tensor = nodes + self.update(given)
        return updated


class _Graphs(nn.Module):
    """A graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Messages() for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return a number for each node."""
        for layer in self.layers:
            nodes = layer(nodes, edges)
        numbers: Tensor = self.head(nodes)
        return numbers


@setting()
def graph_network(world: World) -> Training:
    """Graph network: nodes and edges change in number, each by its own."""
    model = _Graphs()

    def loss(n_nodes: int) -> Any:
        n_edges = world.number(3 * n_nodes, 4 * n_nodes)
        edges = world.integers(n_nodes, 2, n_edges)
        numbers = model(world.floats(n_nodes, WIDTH), edges)
        return (numbers - 1).square().mean()

    return world.train(model, loss, lengths=(64, 480), multiple=16)
