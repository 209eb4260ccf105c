"""Weights that are averaged, tied, frozen, chosen or replaced."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn

from benchmarks.proofs.settings.case import ROWS, Training, World, setting
from benchmarks.proofs.settings.parts import (
    WIDTH,
    Encoder,
    Scored,
    cross_entropy,
    language,
    language_loss,
    next_token_loss,
)


@setting()
def ema(world: World) -> Training:
    """An average of the weights, evaluated every fourth step."""
    model = Scored().to(world.device)
    average = AveragedModel(model)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> Tensor:
        loss = world.descend(optimizer, language_loss(world, model, length))
        average.update_parameters(model)
        if next(steps) % 4 == 3:
            average.eval()
            with torch.no_grad():
                loss = loss + language_loss(world, average, length)
            average.train()
        return loss

    return Training(roots=[model], step=step, others=[average])


@setting()
def swa(world: World) -> Training:
    """SWA: an average of the attached model, its statistics made by update_bn."""
    model = nn.Sequential(
        nn.Linear(16, WIDTH),
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(8)
        ),
        nn.Linear(WIDTH, 1),
    ).to(world.device)
    optimizer = world.adamw(model)
    averages: list[AveragedModel] = []

    def step(rows: int) -> Tensor:
        given = world.floats(rows, 16)
        loss = world.descend(optimizer, (model(given) - 1).square().mean())
        if not averages:
            averages.append(AveragedModel(model))
        averages[0].update_parameters(model)
        if len(given) % 128 == 0:
            update_bn([given, given], averages[0])
            loss = loss + averages[0](given).detach().mean()
        return loss

    return Training(roots=[model], step=step, lengths=(256, 2048), multiple=64)


@setting()
def tied_weights(world: World) -> Training:
    """The head's weight is the embedding's."""
    model = Scored()
    model.head.weight = model.embed.weight
    model.to(world.device)
    return language(world, model)


@setting()
def gradual_unfreezing(world: World) -> Training:
    """First the head alone is trained, then ever more layers from the top."""
    model = Scored()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = iter(range(10_000))

    def step(length: int) -> Tensor:
        number = next(steps)
        if number in (4, 8):
            for layer in list(model.layers)[-3 if number == 4 else 0 :]:
                layer.requires_grad_(True)
        return world.descend(optimizer, language_loss(world, model, length))

    return Training(roots=[model], step=step, steps_before=9)


class _Two(Encoder):
    """Two heads, of which the task chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(
            {"a": nn.Linear(WIDTH, 8), "b": nn.Linear(WIDTH, 30)}
        )

    def forward(self, ids: Tensor, task: str = "a") -> Tensor:  # type: ignore[override]
        """Return a task's logits."""
        logits: Tensor = self.heads[task](super().forward(ids))
        return logits


@setting()
def tasks_by_turns(world: World) -> Training:
    """Several tasks by turns, each with its head; the task is a text argument."""
    model = _Two()
    steps = iter(range(10_000))

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        task, classes = (("a", 8), ("b", 30))[next(steps) % 2]
        return cross_entropy(model(ids, task), ids % classes)

    return world.train(model, loss)


@setting()
def masked_labels(world: World) -> Training:
    """The loss is of some tokens alone, picked behind the model by a mask."""
    model = Encoder().to(world.device)
    head = nn.Linear(WIDTH, 64).to(world.device)
    optimizer = world.adamw(model, head)

    def step(length: int) -> Tensor:
        ids = world.ids(length)
        chosen = world.floats(ROWS, length) > 1.0
        logits = head(model(ids)[chosen])
        return world.descend(optimizer, functional.cross_entropy(logits, ids[chosen]))

    return Training(roots=[model], step=step, others=[head])


@setting("refused", "functional_call")
def meta_learning(world: World) -> Training:
    """MAML: functional_call with weights of an inner step, two forwards a backward."""
    model = Scored(dropout=0.0).to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> Tensor:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        support, query = world.ids(length, 4), world.ids(length, 4)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            inner = next_token_loss(
                functional_call(model, weights, (support,)), support
            )
            slopes = torch.autograd.grad(
                inner, list(weights.values()), create_graph=True
            )
            fast = {
                name: weight - 0.1 * slope
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
            loss = next_token_loss(functional_call(model, fast, (query,)), query)
            return world.descend(optimizer, loss)

    return Training(roots=[model], step=step, lengths=(16, 48))


@setting("refused", "functional_call")
def other_weights(world: World) -> Training:
    """functional_call with weights made of the model's own (weight noise)."""
    model = Scored()

    def loss(length: int) -> Tensor:
        ids = world.ids(length)
        noisy = {
            name: weight * (1 + 0.01 * torch.randn_like(weight))
            for name, weight in model.named_parameters()
        }
        logits = functional_call(model, noisy, (ids,))
        return next_token_loss(logits, ids)

    return world.train(model, loss)
