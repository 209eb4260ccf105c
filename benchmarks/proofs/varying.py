"""Trainings whose steps run another sequence of layers each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.proofs.settings.case import VOCABULARY, World
from benchmarks.proofs.settings.parts import Block, next_token_loss

_WIDTH, _LAYERS, _ROWS = 64, 8, 16
_LENGTHS = (96, 256, 8)
"""The least, the greatest, and what they are multiples of."""
_SEEN_ROWS, _PATCH, _SIDE = 8, 4, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Varying:
    """A training, built; `loss` is of one of the batches."""

    model: nn.Module
    batches: Sequence[Any]
    loss: Callable[[Any], Tensor]


Builder: TypeAlias = Callable[[World, int], Varying]
"""Of a world and a number of batches."""


class _Layered(nn.Module):
    """Tokens to logits through layers, of which a step runs some."""

    def __init__(self, layers: int = _LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(Block(_WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY)

    def read(self, states: Tensor) -> Tensor:
        """Turn states into logits."""
        logits: Tensor = self.head(self.norm(states))
        return logits


class _Drops(_Layered):
    def forward(self, ids: Tensor) -> Tensor:
        """Run each layer with a probability of 0.8."""
        states = self.embed(ids)
        for layer in self.layers:
            if float(torch.rand(())) >= 0.2:
                states = layer(states)
        return self.read(states)


class _Exits(_Layered):
    def forward(self, ids: Tensor) -> Tensor:
        """Run four layers and more, as the first token says."""
        states = self.embed(ids)
        for layer in self.layers[: 4 + int(ids[0, 0]) % 5]:
            states = layer(states)
        return self.read(states)


def _lengths(world: World, steps: int) -> list[int]:
    least, most, multiple = _LENGTHS
    n_sizes = (most - least) // multiple
    return [least + multiple * world.number(0, n_sizes) for _ in range(steps)]


def _on_texts(world: World, model: nn.Module, steps: int) -> Varying:
    model.to(world.device)
    batches = [world.ids(length, _ROWS) for length in _lengths(world, steps)]
    return Varying(
        model=model, batches=batches, loss=lambda ids: next_token_loss(model(ids), ids)
    )


def layerdrop(world: World, steps: int) -> Varying:
    """LayerDrop of 0.2: the model's loop skips layers at random."""
    return _on_texts(world, _Drops(), steps)


def early_exit(world: World, steps: int) -> Varying:
    """4 to 8 layers, as the batch's content says."""
    return _on_texts(world, _Exits(), steps)


def _wav2vec2(world: World, steps: int, probability: float) -> Varying:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=probability,
        mask_time_prob=0.0,
        ctc_zero_infinity=True,
    )
    model: nn.Module = Wav2Vec2ForCTC(config)
    model.to(world.device)
    batches = [
        {
            "input_values": world.floats(_ROWS, 20 * length),
            "labels": 3 + world.integers(29, _ROWS, 6),
        }
        for length in _lengths(world, steps)
    ]
    return Varying(model=model, batches=batches, loss=lambda batch: model(**batch).loss)


def wav2vec2(world: World, steps: int) -> Varying:
    """wav2vec 2.0 with its default LayerDrop of 0.1."""
    return _wav2vec2(world, steps, 0.1)


def wav2vec2_more(world: World, steps: int) -> Varying:
    """wav2vec 2.0 with a LayerDrop of 0.3."""
    return _wav2vec2(world, steps, 0.3)


# ------------------------------------------------------------------ parts


class _Sees(_Layered):
    """Images through a tower, one after the other, then all of it with a text."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.tower = nn.ModuleList(Block(_WIDTH) for _ in range(3))

    def forward(self, ids: Tensor, images: Sequence[Tensor] | Tensor) -> Tensor:
        """Return the text's logits."""
        seen = [self.look(image) for image in images]
        states = torch.cat([*seen, self.embed(ids)], 1)
        for layer in self.layers:
            states = layer(states)
        return self.read(states[:, -ids.shape[1] :])

    def look(self, image: Tensor) -> Tensor:
        """Return the states of one image for each row."""
        states: Tensor = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.tower:
            states = layer(states)
        return states


def _with_images(
    world: World, steps: int, images: Callable[[int], Sequence[Tensor] | Tensor]
) -> Varying:
    model = _Sees().to(world.device)
    batches = [
        (world.ids(length // 2, _SEEN_ROWS), images(world.number(1, 6)))
        for length in _lengths(world, steps)
    ]

    def loss(batch: tuple[Tensor, Any]) -> Tensor:
        return next_token_loss(model(*batch), batch[0])

    return Varying(model=model, batches=batches, loss=loss)


def images(world: World, steps: int) -> Varying:
    """1 to 6 images a text, in a list."""
    return _with_images(
        world,
        steps,
        lambda n: [world.floats(_SEEN_ROWS, 3, _SIDE, _SIDE) for _ in range(n)],
    )


def images_in_one(world: World, steps: int) -> Varying:
    """1 to 6 images a text, in one tensor that the model loops over."""
    return _with_images(
        world, steps, lambda n: world.floats(n, _SEEN_ROWS, 3, _SIDE, _SIDE)
    )


class _Chunks(_Layered):
    def forward(self, chunks: Sequence[Tensor]) -> Tensor:
        """Run the first layers on each chunk, the others on their means."""
        states = torch.stack([self.inner(chunk).mean(1) for chunk in chunks], 1)
        for layer in self.layers[5:]:
            states = layer(states)
        return self.read(states)

    def inner(self, ids: Tensor) -> Tensor:
        """Run the first layers on one."""
        states: Tensor = self.embed(ids)
        for layer in self.layers[:5]:
            states = layer(states)
        return states


def chunks(world: World, steps: int) -> Varying:
    """2 to 7 chunks a document, in a list, all of a batch padded to one length."""
    model = _Chunks().to(world.device)
    batches = [
        [world.ids(length // 2, _ROWS) for _ in range(world.number(2, 7))]
        for length in _lengths(world, steps)
    ]

    def loss(batch: Sequence[Tensor]) -> Tensor:
        return next_token_loss(model(batch), torch.stack([c[:, 0] for c in batch], 1))

    return Varying(model=model, batches=batches, loss=loss)


VARYING: dict[str, Builder] = {
    "layerdrop": layerdrop,
    "early-exit": early_exit,
    "wav2vec2-0.1": wav2vec2,
    "wav2vec2-0.3": wav2vec2_more,
    "images": images,
    "images-in-one": images_in_one,
    "chunks": chunks,
}
"""All of them, by name."""
