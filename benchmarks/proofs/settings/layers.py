"""Which layers run, and what they take."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.proofs.settings.case import ROWS, Training, World, setting
from benchmarks.proofs.settings.parts import (
    LAYERS,
    WIDTH,
    Block,
    Scored,
    language,
    next_token_loss,
    with_layers,
)

# ------------------------------------------------------------------ which layers run


class _Dropped(Scored):
    """Skips whole layers at random, by a random number of Python's."""

    def run(self, states: Tensor, mask: Any = None) -> Tensor:
        """Run some layers."""
        for layer in self.layers:
            if not self.training or random.random() >= 0.2:
                states = layer(states, mask)
        return states


@setting()
def layerdrop(world: World) -> Training:
    """LayerDrop: the model's loop skips layers at random."""
    return language(world, _Dropped())


class _DropsItself(Block):
    """A layer that is the identity at random, decided inside."""

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run, or do not."""
        if self.training and torch.rand(()).item() < 0.2:
            return states
        return super().forward(states, mask)


@setting()
def layerdrop_inside(world: World) -> Training:
    """Stochastic depth: each layer decides inside whether it is the identity."""
    return language(world, with_layers(*(_DropsItself() for _ in range(LAYERS))))


class _DropsRows(Block):
    """A layer whose update is dropped for some rows of the batch."""

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run, and drop rows."""
        update = super().forward(states, mask) - states
        kept = torch.rand(len(states), 1, 1, device=states.device) >= 0.2
        return states + update * kept / 0.8


@setting()
def stochastic_depth(world: World) -> Training:
    """Stochastic depth: each layer drops its update for rows of the batch."""
    return language(world, with_layers(*(_DropsRows() for _ in range(LAYERS))))


class _LeavesEarly(Scored):
    """Runs as many layers as the first token says."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits."""
        states = self.embed(ids)
        most = 3 + int(ids[0, 0]) % 4
        for layer in self.layers[:most]:
            states = layer(states, mask)
        return self.read(states)


@setting()
def early_exit(world: World) -> Training:
    """Python decides by the batch's content how many layers run."""
    return language(world, _LeavesEarly())


class _Looped(Scored):
    """One layer, run again and again."""

    def run(self, states: Tensor, mask: Any = None) -> Tensor:
        """Run them three times."""
        for _ in range(3):
            states = super().run(states, mask)
        return states


@setting()
def looped_layers(world: World) -> Training:
    """Universal transformer: two layers run three times each."""
    return language(world, _Looped(layers=2))


class _Sees(Scored):
    """Images through a tower, one after the other, before a text."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.tower = nn.ModuleList(Block() for _ in range(3))

    def forward(  # type: ignore[override]
        self, ids: Tensor, images: Sequence[Tensor] | Tensor
    ) -> Tensor:
        """Return the text's logits."""
        seen = [self.look(image) for image in images]
        states = self.run(torch.cat([*seen, self.embed(ids)], 1))
        return self.read(states[:, -ids.shape[1] :])

    def look(self, image: Tensor) -> Tensor:
        """Return the states of one image for each row."""
        states: Tensor = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.tower:
            states = layer(states)
        return states


def _seeing(
    world: World, images: Callable[[int], Sequence[Tensor] | Tensor]
) -> Training:
    model = _Sees()

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        return next_token_loss(model(ids, images(world.number(1, 4))), ids)

    return world.train(model, loss)


@setting()
def images_in_a_list(world: World) -> Training:
    """1 to 4 images a text, in a list, through a tower one after the other."""
    return _seeing(world, lambda n: [world.floats(ROWS, 3, 24, 24) for _ in range(n)])


@setting()
def images_in_a_tensor(world: World) -> Training:
    """1 to 4 images a text, in one tensor that the model's loop goes over."""
    return _seeing(world, lambda n: world.floats(n, ROWS, 3, 24, 24))


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

    def forward(self, states: Tensor) -> Tensor:
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
        self.attention, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.experts = _Experts()

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run both."""
        states = self.attention(states, mask)
        routed: Tensor = self.experts(self.norm(states))
        return states + routed


@setting()
def experts(world: World) -> Training:
    """Mixture of experts: top 2 of 4 for each token, rows gathered by the routing."""
    return language(world, with_layers(*(_ExpertBlock() for _ in range(4))))


# ------------------------------------------------------------------ what layers take


class _Kept(nn.Module):
    """A layer that takes its states by keyword alone, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(
        self, *, hidden_states: Tensor, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """Run."""
        return {"hidden_states": self.block(hidden_states, *extra["masks"])}


class _ByKeyword(Scored):
    """Calls layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Kept() for _ in range(LAYERS))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits."""
        states = {"hidden_states": self.embed(ids)}
        for layer in self.layers:
            states = layer(extra={"masks": [mask]}, **states)
        return self.read(states["hidden_states"])


@setting()
def keyword_states(world: World) -> Training:
    """Layers take states by keyword, nested arguments, and return dictionaries."""
    return language(world, _ByKeyword())


@dataclass
class _Output:
    logits: Tensor
    inner: tuple[Tensor, ...]


class _Structured(Scored):
    """Nested inputs, a dataclass as output."""

    def forward(self, batch: dict[str, Any]) -> _Output:  # type: ignore[override]
        """Return logits and all inner states."""
        states, inner = self.embed(batch["texts"][0]), []
        for layer in self.layers:
            states = layer(states, batch["extra"]["mask"])
            inner.append(states)
        return _Output(self.read(states), tuple(inner))


@setting()
def nested_inputs(world: World) -> Training:
    """A dictionary of lists in, a dataclass out, a loss of the inner states as well."""
    model = _Structured()

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        mask = ids[:, None, None, :] > 4
        said = model({"texts": [ids], "extra": {"mask": mask}})
        loss = next_token_loss(said.logits, ids)
        for inner in said.inner[:3]:
            loss = loss + 0.01 * inner.square().mean()
        return loss

    return world.train(model, loss)


@setting()
def auxiliary_losses(world: World) -> Training:
    """Deep supervision: hooks take two inner layers' outputs into the loss."""
    model = Scored()
    inner: list[Tensor] = []
    for layer in (model.layers[1], model.layers[3]):
        layer.register_forward_hook(lambda _m, _i, output: inner.append(output))

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        inner.clear()
        loss = next_token_loss(model(ids), ids)
        for states in inner:
            loss = loss + 0.3 * next_token_loss(model.head(states), ids)
        inner.clear()
        return loss

    return world.train(model, loss)


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

    def step(length: int) -> Tensor:
        ids = world.ids(length)
        loss = world.descend(optimizer, next_token_loss(model(ids), ids))
        return loss + counts["before"] + 1_000 * counts["backward"]

    return Training(roots=[model], step=step)
