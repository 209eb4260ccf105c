"""Small models that the settings are put together from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.proofs.settings.case import ROWS, VOCABULARY, Training, World

WIDTH, LAYERS = 64, 6
_HEADS = 4


def heads(states: Tensor) -> Tensor:
    """Split the width (rows, length, width) among attention's heads."""
    rows, length, width = states.shape
    return states.view(rows, length, _HEADS, width // _HEADS).transpose(1, 2)


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend, where the mask (rows, 1, length or 1, length) is true."""
        q, k, v = map(heads, self.qkv(self.before(states)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(states.shape)
        states = states + self.dropout(self.out(mixed))
        wide = functional.gelu(self.up(self.after(states)))
        given: Tensor = states + self.dropout(self.down(wide))
        return given


class Encoder(nn.Module):
    """Tokens to states."""

    def __init__(self, layers: int = LAYERS, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return states (rows, length, width)."""
        normed: Tensor = self.norm(self.run(self.embed(ids), mask))
        return normed

    def run(self, states: Tensor, mask: Any = None) -> Tensor:
        """Run the layers."""
        for layer in self.layers:
            states = layer(states, mask)
        return states


class Pooled(Encoder):
    """Texts to vectors."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean state of each text."""
        return super().forward(ids, mask).mean(1)


class Scored(Encoder):
    """Tokens to logits."""

    def __init__(self, n_logits: int = VOCABULARY, **changes: Any) -> None:
        super().__init__(**changes)
        self.head = nn.Linear(WIDTH, n_logits)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits (rows, length, n_logits)."""
        return self.read(self.run(self.embed(ids), mask))

    def read(self, states: Tensor) -> Tensor:
        """Turn the last layer's states into logits."""
        logits: Tensor = self.head(self.norm(states))
        return logits


class Residual(nn.Module):
    """Two convolutions with normalization."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_too = nn.BatchNorm2d(channels)

    def forward(self, image: Tensor) -> Tensor:
        """Return an image of the same size."""
        inner = functional.relu(self.norm(self.first(image)))
        return functional.relu(image + self.norm_too(self.second(inner)))


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, states: Tensor) -> Tensor:
        """Run them."""
        for layer in self.layers:
            states = layer(states)
        return states


def with_layers(*layers: nn.Module) -> Scored:
    """Return a model with other layers."""
    model = Scored(layers=1)
    model.layers = nn.ModuleList(layers)
    return model


class Widened(nn.Module):
    """Calls a layer that takes no mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor, _mask: None = None) -> Tensor:
        """Run the layer with a residual."""
        given: Tensor = self.inner(states)
        return states + given


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return a language model's loss."""
    return cross_entropy(logits[:, :-1], ids[:, 1:])


def info_nce(one: Tensor, other: Tensor) -> Tensor:
    """Return the contrastive loss of pairs (rows, width)."""
    scores = functional.normalize(one) @ functional.normalize(other).t() / 0.1
    return functional.cross_entropy(scores, torch.arange(len(one), device=one.device))


def language_loss(
    world: World, model: nn.Module, length: int, rows: int = ROWS
) -> Tensor:
    """Draw texts; return a language model's loss on them."""
    ids = world.ids(length, rows)
    return next_token_loss(model(ids), ids)


def language(world: World, model: nn.Module, **changes: Any) -> Training:
    """Train a model of tokens to logits to tell the next one."""
    return world.train(
        model, lambda length: language_loss(world, model, length), **changes
    )
