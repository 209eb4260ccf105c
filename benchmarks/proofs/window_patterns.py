"""Training steps of several forwards, or several backwards, for the proof of windows.

To add one, write a builder and put `pattern` on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.proofs.settings.case import ROWS, Training, World
from benchmarks.proofs.settings.parts import (
    WIDTH,
    Encoder,
    Pooled,
    Scored,
    Stack,
    info_nce,
    next_token_loss,
)

Builder: TypeAlias = Callable[[World], Training]

PATTERNS: dict[str, Pattern] = {}
"""All of them, by name."""
_LENGTHS = (64, 256)


class Pattern(NamedTuple):
    """A way to train."""

    build: Builder
    n_backwards: int
    """That go through each forward."""


def pattern(n_backwards: int = 1) -> Callable[[Builder], Builder]:
    """Add a builder to the patterns, under its own name: see `Pattern`."""

    def add(build: Builder) -> Builder:
        PATTERNS[build.__name__.replace("_", "-")] = Pattern(build, n_backwards)
        return build

    return add


def lengths_of(training: Training, steps: int, seed: int) -> Iterator[int]:
    """Yield the lengths of a training's batches."""
    generator = torch.Generator().manual_seed(seed)
    least, most = training.lengths
    n_sizes = (most - least) // training.multiple + 1
    drawn = torch.randint(n_sizes, (steps,), generator=generator)
    for number in drawn.tolist():
        yield least + training.multiple * number


@pattern()
def simcse(world: World) -> Training:
    """Contrastive: the same texts twice, under other dropout, before one backward."""
    model = Pooled()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, ROWS // 2)
        return info_nce(model(ids), model(ids))

    return world.train(model, loss, lengths=_LENGTHS)


@pattern()
def triplet(world: World) -> Training:
    """Anchor, positive and negative, of three lengths, each in a call of its own."""
    model = Pooled()

    def loss(length: int) -> Tensor:
        others = world.number(8, 32) * 8, world.number(8, 32) * 8
        one, near, far = (model(world.ids(n, 3)) for n in (length, *others))
        return functional.triplet_margin_loss(one, near, far)

    return world.train(model, loss, lengths=_LENGTHS)


@pattern()
def preference(world: World) -> Training:
    """DPO: chosen and rejected of two lengths, a frozen reference under no_grad."""
    policy = Scored().to(world.device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def likelihood(model: nn.Module, ids: Tensor) -> Any:
        logits = model(ids)[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))

    def loss(length: int) -> Tensor:
        other = world.number(length // 8, length // 4) * 4
        chosen, rejected = world.ids(length, 4), world.ids(other, 4)
        with torch.no_grad():
            there = likelihood(reference, chosen) - likelihood(reference, rejected)
        margin = likelihood(policy, chosen) - likelihood(policy, rejected) - there
        return -functional.logsigmoid(0.1 * margin).mean()

    return world.train(policy, loss, others=[reference], lengths=_LENGTHS)


@pattern()
def chunks(world: World) -> Training:
    """A batch in four chunks, whose losses are added up before one backward."""
    model = Scored()

    def loss(length: int) -> Any:
        ids = world.ids(length, ROWS)
        losses = [next_token_loss(model(chunk), chunk) for chunk in ids.chunk(4)]
        return torch.stack(losses).mean()

    return world.train(model, loss, lengths=_LENGTHS)


class _Critic(nn.Module):
    """Sequences of vectors to a score each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(*Encoder(dropout=0.0).layers)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.score(self.body(states).mean(1))
        return scores


def _scores(critic: nn.Module, states: Tensor, sign: int) -> Tensor:
    return functional.softplus(sign * critic(states)).mean()


@pattern()
def gan(world: World) -> Training:
    """GAN: the critic on real and on fake, then on fakes for the generator."""
    critic = _Critic().to(world.device)
    generator = nn.Linear(16, WIDTH).to(world.device)
    optimizers = world.adamw(critic), world.adamw(generator)

    def step(length: int) -> Tensor:
        real = world.floats(ROWS // 2, length, WIDTH)
        with torch.no_grad():
            fake = generator(world.floats(ROWS // 2, length, 16))
        loss = _scores(critic, real, -1) + _scores(critic, fake, 1)
        loss = world.descend(optimizers[0], loss)
        deceived = _scores(critic, generator(world.floats(ROWS // 2, length, 16)), -1)
        critic.zero_grad()
        loss = loss + world.descend(optimizers[1], deceived)
        critic.zero_grad()
        return loss

    return Training(roots=[critic], others=[generator], step=step, lengths=_LENGTHS)


@pattern(n_backwards=2)
def two_backwards(world: World) -> Training:
    """Two losses of one forward, each with a backward of its own (retain_graph)."""
    model = Scored()

    def loss(length: int) -> Any:
        ids = world.ids(length)
        logits = model(ids)
        next_token_loss(logits, ids).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return 0.1 * logits.square().mean()

    return world.train(model, loss, lengths=_LENGTHS)


@pattern(n_backwards=2)
def gradient_penalty(world: World) -> Training:
    """WGAN-GP: the gradient of a score is a part of the loss (create_graph)."""
    critic = _Critic().to(world.device)
    optimizer = world.adamw(critic)

    def step(length: int) -> Tensor:
        states = world.floats(ROWS // 2, length, WIDTH).requires_grad_()
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            score = critic(states).mean()
            (slope,) = torch.autograd.grad(score, states, create_graph=True)
            return world.descend(optimizer, score + slope.square().sum())

    return Training(roots=[critic], step=step, lengths=(64, 160))
