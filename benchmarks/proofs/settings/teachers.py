"""Preferences, reinforcement, teachers."""

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
from benchmarks.proofs.settings.parts import (
    LAYERS,
    WIDTH,
    Encoder,
    Scored,
    cross_entropy,
    next_token_loss,
)

# ------------------------------------------------------------------ preferences, RL


def _log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return chosen.sum((1, 2))


def _preference(own: tuple[Tensor, Tensor], reference: tuple[Tensor, ...]) -> Tensor:
    margin = (own[0] - reference[0]) - (own[1] - reference[1])
    return -functional.logsigmoid(0.1 * margin).mean()


def _dpo(world: World, *, in_one: bool) -> Training:
    policy = Scored().to(world.device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def likelihoods(
        model: nn.Module, one: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        if in_one:
            ids = torch.cat([one, other])
            found = _log_likelihood(model(ids), ids).chunk(2)
            return found[0], found[1]
        return _log_likelihood(model(one), one), _log_likelihood(model(other), other)

    def loss(length: int) -> Tensor:
        pair = world.ids(length, ROWS // 2), world.ids(length, ROWS // 2)
        with torch.no_grad():
            there = likelihoods(reference, *pair)
        return _preference(likelihoods(policy, *pair), there)

    return world.train(policy, loss, others=[reference])


@setting()
def preference_one_call(world: World) -> Training:
    """DPO: chosen and rejected concatenated; a frozen reference under no_grad."""
    return _dpo(world, in_one=True)


@setting()
def preference_two_calls(world: World) -> Training:
    """DPO: the policy called on chosen, then on rejected."""
    return _dpo(world, in_one=False)


class _Actor(Encoder):
    """A policy and a value from shared layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.policy, self.value = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return logits and values of each token."""
        states = super().forward(ids)
        return {"logits": self.policy(states), "values": self.value(states)[..., 0]}


def _likely(logits: Tensor) -> Any:
    return torch.distributions.Categorical(logits=logits)


@setting()
def reinforcement(world: World) -> Training:
    """PPO: a rollout in eval mode under no_grad, then two epochs of clipped steps."""
    model = _Actor().to(world.device)
    optimizer = world.adamw(model)

    def rollout(length: int) -> tuple[Tensor, ...]:
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

    def step(length: int) -> Tensor:
        ids, actions, old, gains = rollout(length)
        for _ in range(2):
            said = model(ids)
            likely = _likely(said["logits"])
            ratio = (likely.log_prob(actions) - old).exp()
            clipped = torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
            error = (said["values"] - gains).square().mean()
            loss = error - clipped.mean() - 0.01 * likely.entropy().mean()
            loss = world.descend(optimizer, loss)
        last: Tensor = loss
        return last

    return Training(roots=[model], step=step)


@setting()
def reward_model(world: World) -> Training:
    """Ranking: the better and the worse answer in one call."""
    model = Scored(1)

    def loss(length: int) -> Tensor:
        better, worse = model(world.ids(length))[:, -1].chunk(2)
        return -functional.logsigmoid(better - worse).mean()

    return world.train(model, loss)


# ------------------------------------------------------------------ teachers


@setting()
def distillation(world: World) -> Training:
    """A student learns from a larger teacher in eval mode under no_grad."""
    student, teacher = Scored(), Scored(layers=8).to(world.device)
    teacher.eval().requires_grad_(False)

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        with torch.no_grad():
            expected = teacher(ids).softmax(-1)
        likely = student(ids).log_softmax(-1)
        return functional.kl_div(likely, expected, reduction="batchmean")

    return world.train(student, loss, others=[teacher])


class _Pupil(nn.Module):
    """Holds its teacher as a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Scored(), Scored()
        self.teacher.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        with torch.no_grad():
            expected = self.teacher.eval()(ids).softmax(-1)
        likely = self.student(ids).log_softmax(-1)
        return functional.kl_div(likely, expected, reduction="batchmean")


@setting()
def distillation_in_one_module(world: World) -> Training:
    """The teacher is a submodule of what is trained, called under no_grad."""
    model = _Pupil()

    def loss(length: int) -> Any:
        return model(world.ids(length))

    return world.train(model, loss)


@setting()
def mean_teacher(world: World) -> Training:
    """The teacher is an average of the student, called in training mode."""
    student = Scored().to(world.device)
    swa: Any = torch.optim.swa_utils
    teacher = swa.AveragedModel(student, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    optimizer = world.adamw(student)

    def step(length: int) -> Tensor:
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


@setting()
def r_drop(world: World) -> Training:
    """The same batch twice through dropout, and the difference in the loss."""
    model = Scored()

    def loss(length: int) -> Tensor:
        ids = world.ids(length, ROWS // 2)
        one, other = model(ids).log_softmax(-1), model(ids).log_softmax(-1)
        gap = functional.kl_div(one, other, reduction="batchmean", log_target=True)
        return gap + next_token_loss(one, ids)

    return world.train(model, loss)


@setting()
def vae(world: World) -> Training:
    """Encoder, a drawn latent, decoder, in one module."""

    class _Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(LAYERS // 2)
            self.decoder = Scored(layers=LAYERS // 2)
            self.moments = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            mean, scale = self.moments(self.encoder(ids)).chunk(2, -1)
            latent = mean + scale.exp() * torch.randn_like(mean)
            states = self.decoder.run(latent)
            gap = (mean.square() + scale.exp().square() - 2 * scale).mean()
            return self.decoder.head(states), gap

    model = _Vae()

    def loss(length: int) -> Any:
        ids = world.ids(length)
        logits, gap = model(ids)
        return cross_entropy(logits, ids) + 0.1 * gap

    return world.train(model, loss)
