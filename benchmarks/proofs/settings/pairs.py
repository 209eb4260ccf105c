"""Two models, or two calls of one: pairs and adversaries."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.proofs.settings.case import (
    ROWS,
    Training,
    World,
    setting,
)
from benchmarks.proofs.settings.parts import WIDTH, Encoder, Pooled, Stack, info_nce

# ------------------------------------------------------------------ pairs


class _Towers(nn.Module):
    """Two encoders, and a vector from each."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.passage = Pooled(), Pooled()

    def forward(self, query: Tensor, passage: Tensor) -> tuple[Tensor, Tensor]:
        """Return both vectors."""
        return self.query(query), self.passage(passage)


@setting()
def two_towers(world: World) -> Training:
    """Contrastive: two encoders in one module, one forward of it a step."""
    model = _Towers()

    def loss(length: int) -> Tensor:
        vectors = model(world.ids(length // 4), world.ids(length))
        return info_nce(*vectors)

    return world.train(model, loss)


@setting()
def two_towers_apart(world: World) -> Training:
    """Contrastive: two models, a session on each."""
    query, passage = Pooled().to(world.device), Pooled().to(world.device)
    optimizer = world.adamw(query, passage)

    def step(length: int) -> Tensor:
        one, other = query(world.ids(length // 4)), passage(world.ids(length))
        return world.descend(optimizer, info_nce(one, other))

    return Training(roots=[query, passage], step=step)


@setting()
def simclr_two_calls(world: World) -> Training:
    """Contrastive: one encoder called on either view before one backward."""
    model = Pooled()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, ROWS // 2)
        return info_nce(model(ids), model(ids.flip(1)))

    return world.train(model, loss)


@setting()
def simclr_one_call(world: World) -> Training:
    """Contrastive: both views concatenated, one call of the encoder."""
    model = Pooled()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, ROWS // 2)
        vectors = model(torch.cat([ids, ids.flip(1)]))
        return info_nce(*vectors.chunk(2))

    return world.train(model, loss)


class _Both(nn.Module):
    """Calls an encoder on either view, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Pooled()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        return info_nce(self.encoder(ids), self.encoder(ids.flip(1)))


@setting()
def simclr_in_one_module(world: World) -> Training:
    """Contrastive: a module whose forward calls the encoder twice."""
    model = _Both()

    def loss(length: int) -> Any:
        return model(world.ids(length, ROWS // 2))

    return world.train(model, loss)


@setting()
def moco(world: World) -> Training:
    """Contrastive: a momentum encoder without gradients, and a queue of its vectors."""
    model = Pooled()
    momentum = copy.deepcopy(model).requires_grad_(False)
    queue = [functional.normalize(world.floats(32, WIDTH))]

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        with torch.no_grad():
            for old, new in zip(momentum.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)
            keys = functional.normalize(momentum(ids.flip(1)))
        queries = functional.normalize(model(ids))
        scores = queries @ torch.cat([keys, queue[0]]).t() / 0.1
        targets = torch.arange(ROWS, device=scores.device)
        queue[0] = torch.cat([keys, queue[0]])[:32]
        return functional.cross_entropy(scores, targets)

    return world.train(model, loss, others=[momentum])


@setting()
def triplet(world: World) -> Training:
    """Anchor, positive and negative concatenated, split behind the encoder."""
    model = Pooled()

    def loss(length: int) -> Tensor:
        anchor, near, far = model(world.ids(length, 9)).chunk(3)
        return functional.triplet_margin_loss(anchor, near, far)

    return world.train(model, loss)


# ------------------------------------------------------------------ adversaries


class _Generator(nn.Module):
    """Noise to sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.body = Stack(*Encoder().layers)

    def forward(self, noise: Tensor) -> Tensor:
        """Return states."""
        states: Tensor = self.body(self.first(noise))
        return states


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


def _gan(
    world: World, roots: str, *, detach: bool = False, one_batch: bool = True
) -> Training:
    """Build a generator and its critic.

    Args:
        world: Where.
        roots: Which of the two gets a session: ``"g"``, ``"c"`` or ``"gc"``.
        detach: Whether fakes are made with a graph that is thrown away.
        one_batch: Whether the critic sees real and fake in one call.
    """
    generator, critic = _Generator().to(world.device), _Critic().to(world.device)
    optimizers = world.adamw(critic), world.adamw(generator)

    def critics_loss(length: int) -> Tensor:
        noise, real = world.floats(ROWS, length, 16), world.floats(ROWS, length, WIDTH)
        if detach:
            fake = generator(noise).detach()
        else:
            with torch.no_grad():
                fake = generator(noise)
        if one_batch:
            good, bad = critic(torch.cat([real, fake])).chunk(2)
        else:
            good, bad = critic(real), critic(fake)
        return functional.softplus(-good).mean() + functional.softplus(bad).mean()

    def step(length: int) -> Tensor:
        loss = world.descend(optimizers[0], critics_loss(length))
        fake = generator(world.floats(ROWS, length, 16))
        deceived = functional.softplus(-critic(fake)).mean()
        critic.zero_grad()
        loss = loss + world.descend(optimizers[1], deceived)
        critic.zero_grad()
        return loss

    both = {"g": generator, "c": critic}
    return Training(
        roots=[both[name] for name in roots],
        others=[module for name, module in both.items() if name not in roots],
        step=step,
        lengths=(16, 64),
    )


@setting()
def gan_generator(world: World) -> Training:
    """GAN: a session on the generator; fakes for the critic under no_grad."""
    return _gan(world, "g")


@setting("planned", "no backward followed")
def gan_generator_detached(world: World) -> Training:
    """GAN: a session on the generator; fakes for the critic made and detached."""
    return _gan(world, "g", detach=True)


@setting()
def gan_critic(world: World) -> Training:
    """GAN: a session on the critic; real and fake in one call."""
    return _gan(world, "c")


@setting()
def gan_critic_two_calls(world: World) -> Training:
    """GAN: a session on the critic; real and fake in two calls."""
    return _gan(world, "c", one_batch=False)


@setting()
def gan_both(world: World) -> Training:
    """GAN: a session on either model."""
    return _gan(world, "gc")


@setting()
def gradient_penalty(world: World) -> Training:
    """WGAN-GP: the gradient of a score is a part of the loss (create_graph)."""
    critic = _Critic().to(world.device)
    optimizer = world.adamw(critic)

    def step(length: int) -> Tensor:
        states = world.floats(ROWS, length, WIDTH).requires_grad_()
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            score = critic(states).mean()
            (slope,) = torch.autograd.grad(score, states, create_graph=True)
            return world.descend(optimizer, score + slope.square().sum())

    return Training(roots=[critic], step=step, lengths=(16, 48))


@setting()
def adversarial_inputs(world: World) -> Training:
    """FGSM: one backward to the embedded input, one of what it makes of it."""
    critic = _Critic()

    def loss(length: int) -> Any:
        states = world.floats(ROWS, length, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(critic(states).square().mean(), states)
        harder = (states + 0.01 * slope.sign()).detach()
        return critic(harder).square().mean()

    return world.train(critic, loss)
