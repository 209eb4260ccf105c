"""Several models, or one model several times a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mimose.bench.proofs.settings.case import ROWS, Training, World, setting
from mimose.bench.proofs.settings.parts import (
    LAYERS,
    WIDTH,
    Encoder,
    Pooled,
    Scored,
    Stack,
    cross_entropy,
    info_nce,
    next_token_loss,
)

_SEVERAL = "several forwards run before one backward"


class _Towers(nn.Module):
    """Two encoders, and a vector from each."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.passage = Pooled(), Pooled()

    def forward(
        self, query: torch.Tensor, passage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both vectors."""
        return self.query(query), self.passage(passage)


@setting()
def two_towers(world: World) -> Training:
    """Contrastive: two encoders in one module, one forward of it a step."""
    model = _Towers().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        vectors = model(world.ids(length // 4), world.ids(length))
        return world.descend(optimizer, info_nce(*vectors))

    return Training(roots=[model], step=step)


@setting()
def two_towers_apart(world: World) -> Training:
    """Contrastive: two models, a session on each."""
    query, passage = Pooled().to(world.device), Pooled().to(world.device)
    optimizer = world.adamw(query, passage)

    def step(length: int) -> torch.Tensor:
        one, other = query(world.ids(length // 4)), passage(world.ids(length))
        return world.descend(optimizer, info_nce(one, other))

    return Training(roots=[query, passage], step=step)


@setting("recomputed", _SEVERAL)
def simclr_two_calls(world: World) -> Training:
    """Contrastive: one encoder called on either view before one backward."""
    model = Pooled().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length, ROWS // 2)
        return world.descend(optimizer, info_nce(model(ids), model(ids.flip(1))))

    return Training(roots=[model], step=step)


@setting()
def simclr_one_call(world: World) -> Training:
    """Contrastive: both views concatenated, one call of the encoder."""
    model = Pooled().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length, ROWS // 2)
        vectors = model(torch.cat([ids, ids.flip(1)]))
        return world.descend(optimizer, info_nce(*vectors.chunk(2)))

    return Training(roots=[model], step=step)


class _Both(nn.Module):
    """Calls an encoder on either view, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Pooled()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return info_nce(self.encoder(ids), self.encoder(ids.flip(1)))


@setting()
def simclr_in_one_module(world: World) -> Training:
    """Contrastive: a module whose forward calls the encoder twice."""
    model = _Both().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, model(world.ids(length, ROWS // 2)))

    return Training(roots=[model], step=step)


@setting()
def moco(world: World) -> Training:
    """Contrastive: a momentum encoder without gradients, and a queue of its vectors."""
    model = Pooled().to(world.device)
    momentum = copy.deepcopy(model).requires_grad_(False)
    optimizer = world.adamw(model)
    queue = [functional.normalize(world.floats(32, WIDTH))]

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        with torch.no_grad():
            for old, new in zip(momentum.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)
            keys = functional.normalize(momentum(ids.flip(1)))
        queries = functional.normalize(model(ids))
        scores = queries @ torch.cat([keys, queue[0]]).t() / 0.1
        targets = torch.arange(ROWS, device=scores.device)
        queue[0] = torch.cat([keys, queue[0]])[:32]
        return world.descend(optimizer, functional.cross_entropy(scores, targets))

    return Training(roots=[model], step=step, others=[momentum])


@setting()
def triplet(world: World) -> Training:
    """Anchor, positive and negative concatenated, split behind the encoder."""
    model = Pooled().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        anchor, near, far = model(world.ids(length, 9)).chunk(3)
        loss = functional.triplet_margin_loss(anchor, near, far)
        return world.descend(optimizer, loss)

    return Training(roots=[model], step=step)


# ------------------------------------------------------------------ adversaries


class _Generator(nn.Module):
    """Noise to sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.body = Stack(*Encoder().layers)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Return states."""
        states: torch.Tensor = self.body(self.first(noise))
        return states


class _Critic(nn.Module):
    """Sequences of vectors to a score each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(*Encoder(dropout=0.0).layers)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        scores: torch.Tensor = self.score(self.body(states).mean(1))
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

    def critics_loss(length: int) -> torch.Tensor:
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

    def step(length: int) -> torch.Tensor:
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


@setting("recomputed", _SEVERAL)
def gan_critic_two_calls(world: World) -> Training:
    """GAN: a session on the critic; real and fake in two calls."""
    return _gan(world, "c", one_batch=False)


@setting()
def gan_both(world: World) -> Training:
    """GAN: a session on either model."""
    return _gan(world, "gc")


@setting("recomputed", "two backwards")
def gradient_penalty(world: World) -> Training:
    """WGAN-GP: the gradient of a score is a part of the loss (create_graph)."""
    critic = _Critic().to(world.device)
    optimizer = world.adamw(critic)

    def step(length: int) -> torch.Tensor:
        states = world.floats(ROWS, length, WIDTH).requires_grad_()
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            score = critic(states).mean()
            (slope,) = torch.autograd.grad(score, states, create_graph=True)
            return world.descend(optimizer, score + slope.square().sum())

    return Training(roots=[critic], step=step, lengths=(16, 48))


@setting()
def adversarial_inputs(world: World) -> Training:
    """FGSM: one backward to the embedded input, one of what it makes of it."""
    critic = _Critic().to(world.device)
    optimizer = world.adamw(critic)

    def step(length: int) -> torch.Tensor:
        states = world.floats(ROWS, length, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(critic(states).square().mean(), states)
        harder = (states + 0.01 * slope.sign()).detach()
        return world.descend(optimizer, critic(harder).square().mean())

    return Training(roots=[critic], step=step)


# ------------------------------------------------------------------ preferences, RL


def _log_likelihood(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return chosen.sum((1, 2))


def _preference(
    own: tuple[torch.Tensor, torch.Tensor], reference: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    margin = (own[0] - reference[0]) - (own[1] - reference[1])
    return -functional.logsigmoid(0.1 * margin).mean()


def _dpo(world: World, *, in_one: bool) -> Training:
    policy = Scored().to(world.device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = world.adamw(policy)

    def likelihoods(
        model: nn.Module, one: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if in_one:
            ids = torch.cat([one, other])
            found = _log_likelihood(model(ids), ids).chunk(2)
            return found[0], found[1]
        return _log_likelihood(model(one), one), _log_likelihood(model(other), other)

    def step(length: int) -> torch.Tensor:
        pair = world.ids(length, ROWS // 2), world.ids(length, ROWS // 2)
        with torch.no_grad():
            there = likelihoods(reference, *pair)
        return world.descend(optimizer, _preference(likelihoods(policy, *pair), there))

    return Training(roots=[policy], step=step, others=[reference])


@setting()
def preference_one_call(world: World) -> Training:
    """DPO: chosen and rejected concatenated; a frozen reference under no_grad."""
    return _dpo(world, in_one=True)


@setting("recomputed", _SEVERAL)
def preference_two_calls(world: World) -> Training:
    """DPO: the policy called on chosen, then on rejected."""
    return _dpo(world, in_one=False)


class _Actor(Encoder):
    """A policy and a value from shared layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.policy, self.value = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return logits and values of each token."""
        states = super().forward(ids)
        return {"logits": self.policy(states), "values": self.value(states)[..., 0]}


def _likely(logits: torch.Tensor) -> Any:
    return torch.distributions.Categorical(logits=logits)


@setting()
def reinforcement(world: World) -> Training:
    """PPO: a rollout in eval mode under no_grad, then two epochs of clipped steps."""
    model = _Actor().to(world.device)
    optimizer = world.adamw(model)

    def rollout(length: int) -> tuple[torch.Tensor, ...]:
        model.eval()
        ids = world.ids(2)
        with torch.no_grad():
            for _ in range(2):
                model(ids)
            ids = torch.cat([ids, world.ids(length - 2)], dim=1)
            said = model(ids)
            likely = _likely(said["logits"])
            actions = likely.sample()
        model.train()
        rewards = world.floats(*actions.shape)
        return ids, actions, likely.log_prob(actions), rewards - said["values"]

    def step(length: int) -> torch.Tensor:
        ids, actions, old, gains = rollout(length)
        for _ in range(2):
            said = model(ids)
            likely = _likely(said["logits"])
            ratio = (likely.log_prob(actions) - old).exp()
            clipped = torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
            error = (said["values"] - gains).square().mean()
            loss = error - clipped.mean() - 0.01 * likely.entropy().mean()
            loss = world.descend(optimizer, loss)
        last: torch.Tensor = loss
        return last

    return Training(roots=[model], step=step)


@setting()
def reward_model(world: World) -> Training:
    """Ranking: the better and the worse answer in one call."""
    model = Scored(1).to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        better, worse = model(world.ids(length))[:, -1].chunk(2)
        return world.descend(optimizer, -functional.logsigmoid(better - worse).mean())

    return Training(roots=[model], step=step)


# ------------------------------------------------------------------ teachers


@setting()
def distillation(world: World) -> Training:
    """A student learns from a larger teacher in eval mode under no_grad."""
    student, teacher = Scored().to(world.device), Scored(layers=8).to(world.device)
    teacher.eval().requires_grad_(False)
    optimizer = world.adamw(student)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        with torch.no_grad():
            expected = teacher(ids).softmax(-1)
        likely = student(ids).log_softmax(-1)
        loss = functional.kl_div(likely, expected, reduction="batchmean")
        return world.descend(optimizer, loss)

    return Training(roots=[student], step=step, others=[teacher])


class _Pupil(nn.Module):
    """Holds its teacher as a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Scored(), Scored()
        self.teacher.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        with torch.no_grad():
            expected = self.teacher.eval()(ids).softmax(-1)
        likely = self.student(ids).log_softmax(-1)
        return functional.kl_div(likely, expected, reduction="batchmean")


@setting()
def distillation_in_one_module(world: World) -> Training:
    """The teacher is a submodule of what is trained, called under no_grad."""
    model = _Pupil().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, model(world.ids(length)))

    return Training(roots=[model], step=step)


@setting()
def mean_teacher(world: World) -> Training:
    """The teacher is an average of the student, called in training mode."""
    student = Scored().to(world.device)
    swa: Any = torch.optim.swa_utils
    teacher = swa.AveragedModel(student, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    optimizer = world.adamw(student)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        with torch.no_grad():
            expected = teacher(ids).softmax(-1)
        logits = student(ids)
        gap = functional.mse_loss(logits.softmax(-1), expected)
        loss = cross_entropy(logits, ids) + gap
        loss = world.descend(optimizer, loss)
        teacher.update_parameters(student)
        return loss

    return Training(roots=[student], step=step, others=[teacher])


@setting("recomputed", _SEVERAL)
def r_drop(world: World) -> Training:
    """The same batch twice through dropout, and the difference in the loss."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length, ROWS // 2)
        one, other = model(ids).log_softmax(-1), model(ids).log_softmax(-1)
        gap = functional.kl_div(one, other, reduction="batchmean", log_target=True)
        return world.descend(optimizer, gap + next_token_loss(one, ids))

    return Training(roots=[model], step=step)


@setting()
def vae(world: World) -> Training:
    """Encoder, a drawn latent, decoder, in one module."""

    class _Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = (
                Encoder(LAYERS // 2),
                Scored(layers=LAYERS // 2),
            )
            self.moments = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, scale = self.moments(self.encoder(ids)).chunk(2, -1)
            latent = mean + scale.exp() * torch.randn_like(mean)
            states = latent
            for layer in self.decoder.layers:
                states = layer(states)
            gap = (mean.square() + scale.exp().square() - 2 * scale).mean()
            return self.decoder.head(states), gap

    model = _Vae().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        logits, gap = model(ids)
        return world.descend(optimizer, cross_entropy(logits, ids) + 0.1 * gap)

    return Training(roots=[model], step=step)
