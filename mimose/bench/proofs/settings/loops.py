"""Unusual loops around an ordinary model."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn

from mimose.bench.proofs.settings.case import ROWS, Training, World, setting
from mimose.bench.proofs.settings.parts import (
    WIDTH,
    Encoder,
    Scored,
    cross_entropy,
    next_token_loss,
)
from mimose.session import Session


def _loss(
    world: World, model: nn.Module, length: int, rows: int = ROWS
) -> torch.Tensor:
    ids = world.ids(length, rows)
    return next_token_loss(model(ids), ids)


# ------------------------------------------------------------------ gradients


@setting()
def accumulation(world: World) -> Training:
    """Gradients of three batches of different lengths an optimizer step."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        for shorter in (12, 8):
            (_loss(world, model, length - shorter) / 3).backward()  # type: ignore[no-untyped-call]
        return world.descend(optimizer, _loss(world, model, length) / 3)

    return Training(roots=[model], step=step)


@setting()
def zeroed_before(world: World) -> Training:
    """Gradients are forgotten between a forward and its backward."""
    model = Scored().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(length: int) -> torch.Tensor:
        loss = _loss(world, model, length)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Training(roots=[model], step=step)


@setting()
def clipping_and_schedule(world: World) -> Training:
    """Clipped gradients, two groups of parameters, a schedule of learning rates."""
    model = Scored().to(world.device)
    groups: list[dict[str, Any]] = [
        {"params": model.embed.parameters(), "lr": 1e-4},
        {"params": [*model.layers.parameters(), *model.head.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    def step(length: int) -> torch.Tensor:
        loss = _loss(world, model, length)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loss = world.apply(optimizer, loss)
        schedule.step()
        return loss

    return Training(roots=[model], step=step)


@setting()
def autocast(world: World) -> Training:
    """Mixed precision: forward and loss under autocast to bfloat16."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        with torch.autocast(world.device.partition(":")[0], dtype=torch.bfloat16):
            loss = _loss(world, model, length)
        return world.descend(optimizer, loss)

    return Training(roots=[model], step=step)


@setting()
def gradient_scaler(world: World) -> Training:
    """Mixed precision with a GradScaler, which skips steps that overflow."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    kind = world.device.partition(":")[0]
    scaler: Any = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=4)

    def step(length: int) -> torch.Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = _loss(world, model, length)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Training(roots=[model], step=step)


@setting()
def half_weights(world: World) -> Training:
    """Weights and states in bfloat16 throughout."""
    model = Scored().to(world.device, torch.bfloat16)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step)


@setting()
def optimizer_in_backward(world: World) -> Training:
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = Scored().to(world.device)
    each: dict[torch.Tensor, torch.optim.Optimizer] = {
        p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()
    }

    def at_once(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    parameter: Any
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(at_once)

    def step(length: int) -> torch.Tensor:
        loss = _loss(world, model, length)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Training(roots=[model], step=step)


@setting()
def sam(world: World) -> Training:
    """SAM: forward and backward, a step uphill, forward and backward again."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        next_token_loss(model(ids), ids).backward()  # type: ignore[no-untyped-call]
        uphill = [0.01 * p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, up in zip(model.parameters(), uphill, strict=True):
                p.add_(up)
        optimizer.zero_grad()
        loss = next_token_loss(model(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p, up in zip(model.parameters(), uphill, strict=True):
                p.sub_(up)
        return world.apply(optimizer, loss)

    return Training(roots=[model], step=step)


@setting()
def lbfgs(world: World) -> Training:
    """LBFGS: a closure that the optimizer calls several times a step."""
    model = Scored(dropout=0.0).to(world.device)
    optimizer: Any = torch.optim.LBFGS(
        model.parameters(), lr=0.01, max_iter=3, history_size=3
    )

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = next_token_loss(model(ids), ids)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        found: torch.Tensor = optimizer.step(closure)
        optimizer.zero_grad()
        return found.detach()

    return Training(roots=[model], step=step)


@setting("recomputed", "two backwards")
def two_backwards(world: World) -> Training:
    """Two losses of one forward, each with a backward of its own (retain_graph)."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        logits = model(ids)
        loss = next_token_loss(logits, ids)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return world.descend(optimizer, 0.1 * logits.square().mean())

    return Training(roots=[model], step=step)


# ------------------------------------------------------------------ weights


@setting()
def ema(world: World) -> Training:
    """An average of the weights, evaluated every fourth step."""
    model = Scored().to(world.device)
    average = AveragedModel(model)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        loss = world.descend(optimizer, _loss(world, model, length))
        average.update_parameters(model)
        if next(steps) % 4 == 3:
            average.eval()
            with torch.no_grad():
                loss = loss + _loss(world, average, length)
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

    def step(rows: int) -> torch.Tensor:
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
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step)


@setting()
def gradual_unfreezing(world: World) -> Training:
    """First the head alone is trained, then ever more layers from the top."""
    model = Scored()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        number = next(steps)
        if number in (4, 8):
            for layer in list(model.layers)[-3 if number == 4 else 0 :]:
                layer.requires_grad_(True)
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step, steps_before=9)


class _Two(Encoder):
    """Two heads, of which the task chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(
            {"a": nn.Linear(WIDTH, 8), "b": nn.Linear(WIDTH, 30)}
        )

    def forward(self, ids: torch.Tensor, task: str = "a") -> torch.Tensor:  # type: ignore[override]
        """Return a task's logits."""
        logits: torch.Tensor = self.heads[task](super().forward(ids))
        return logits


@setting()
def tasks_by_turns(world: World) -> Training:
    """Several tasks by turns, each with its head; the task is a text argument."""
    model = _Two().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        task, classes = (("a", 8), ("b", 30))[next(steps) % 2]
        loss = cross_entropy(model(ids, task), ids % classes)
        return world.descend(optimizer, loss)

    return Training(roots=[model], step=step)


@setting()
def masked_labels(world: World) -> Training:
    """The loss is of some tokens alone, picked behind the model by a mask."""
    model = Encoder().to(world.device)
    head = nn.Linear(WIDTH, 64).to(world.device)
    optimizer = world.adamw(model, head)

    def step(length: int) -> torch.Tensor:
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

    def step(length: int) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
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
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        ids = world.ids(length)
        noisy = {
            name: weight * (1 + 0.01 * torch.randn_like(weight))
            for name, weight in model.named_parameters()
        }
        logits = functional_call(model, noisy, (ids,))
        return world.descend(optimizer, next_token_loss(logits, ids))

    return Training(roots=[model], step=step)


# ------------------------------------------------------------------ the run


@setting()
def evaluation_between(world: World) -> Training:
    """Evaluation in between: under no_grad, and once in training mode."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        loss = world.descend(optimizer, _loss(world, model, length))
        if next(steps) % 3 == 2:
            model.eval()
            with torch.no_grad():
                loss = loss + _loss(world, model, 80)
            with torch.inference_mode():
                loss = loss + _loss(world, model, 40).clone()
            model.train()
            with torch.no_grad():
                loss = loss + _loss(world, model, 60)
        return loss.detach().clone()

    return Training(roots=[model], step=step)


@setting()
def curriculum(world: World) -> Training:
    """Lengths that grow from step to step."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        if length < 80:  # the longest is asked for beforehand, to find the budget
            length = min(80, 16 + 2 * next(steps))
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step)


def _interrupted(
    world: World, at: Callable[[nn.Module, Callable[[], None]], None]
) -> Training:
    """Train on through a KeyboardInterrupt in every eighth step."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))
    is_due = [False]

    def interrupt() -> None:
        if is_due[0]:
            is_due[0] = False
            raise KeyboardInterrupt

    at(model, interrupt)

    def step(length: int) -> torch.Tensor:
        is_due[0] = next(steps) % 8 == 7
        with contextlib.suppress(KeyboardInterrupt):
            return world.descend(optimizer, _loss(world, model, length))
        optimizer.zero_grad()
        return torch.zeros((), device=world.device)

    return Training(roots=[model], step=step)


@setting("planned", "forward raised KeyboardInterrupt")
def interrupted_forward(world: World) -> Training:
    """Ctrl-C in a layer's forward; the loop catches it and goes on."""

    def at(model: nn.Module, interrupt: Callable[[], None]) -> None:
        layer = model.get_submodule("layers.3.after")
        layer.register_forward_hook(lambda *_: interrupt())

    return _interrupted(world, at)


@setting("planned", "did not run to its end")
def interrupted_backward(world: World) -> Training:
    """Ctrl-C in the backward; the loop catches it and goes on."""

    def at(model: nn.Module, interrupt: Callable[[], None]) -> None:
        layer = model.get_submodule("layers.2")
        layer.register_full_backward_hook(lambda *_: interrupt())

    return _interrupted(world, at)


@setting()
def saved_and_loaded(world: World) -> Training:
    """The session's state is saved, and loaded into it, in mid-training."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, _loss(world, model, length))

    def between(number: int, sessions: Sequence[Session]) -> None:
        if number == 12:
            sessions[0].load_state_dict(copy.deepcopy(sessions[0].state_dict()))

    return Training(roots=[model], step=step, between=between)


@setting()
def weights_saved_and_loaded(world: World) -> Training:
    """Weights and optimizer are saved, and loaded again, in mid-training."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        if next(steps) % 8 == 7:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step)


@setting()
def copied(world: World) -> Training:
    """The attached model is deep-copied and pickled; the copies are trained a step."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> torch.Tensor:
        loss = world.descend(optimizer, _loss(world, model, length))
        if next(steps) % 4 == 1:
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                other = _loss(world, twin, length)
                other.backward()  # type: ignore[no-untyped-call]
                loss = loss + other.detach()
            del twin, other
            gc.collect()  # models are in rings: else they go whenever it comes
        return loss

    return Training(roots=[model], step=step)


@setting()
def compiled_layers(world: World) -> Training:
    """Each layer compiled by itself (backend aot_eager)."""
    model = Scored(dropout=0.0).to(world.device)
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=True)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step)


@setting("refused", "compiled as a whole")
def compiled_model(world: World) -> Training:
    """The model compiled as a whole."""
    model = Scored(dropout=0.0).to(world.device)
    model.compile(backend="aot_eager", dynamic=True)
    optimizer = world.adamw(model)

    def step(length: int) -> torch.Tensor:
        return world.descend(optimizer, _loss(world, model, length))

    return Training(roots=[model], step=step)
