"""Unusual loops around an ordinary model."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.proofs.settings.case import Training, World, setting
from benchmarks.proofs.settings.parts import (
    Scored,
    language,
    language_loss,
    next_token_loss,
)
from mimose.session import Session

# ------------------------------------------------------------------ gradients


@setting()
def accumulation(world: World) -> Training:
    """Gradients of three batches of different lengths an optimizer step."""
    model = Scored()

    def loss(length: int) -> Tensor:
        for shorter in (12, 8):
            (language_loss(world, model, length - shorter) / 3).backward()  # type: ignore[no-untyped-call]
        return language_loss(world, model, length) / 3

    return world.train(model, loss)


@setting()
def zeroed_before(world: World) -> Training:
    """Gradients are forgotten between a forward and its backward."""
    model = Scored().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(length: int) -> Tensor:
        loss = language_loss(world, model, length)
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

    def step(length: int) -> Tensor:
        loss = language_loss(world, model, length)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loss = world.apply(optimizer, loss)
        schedule.step()
        return loss

    return Training(roots=[model], step=step)


@setting()
def autocast(world: World) -> Training:
    """Mixed precision: forward and loss under autocast to bfloat16."""
    model = Scored()

    def loss(length: int) -> Tensor:
        with torch.autocast(world.device.partition(":")[0], dtype=torch.bfloat16):
            loss = language_loss(world, model, length)
        return loss

    return world.train(model, loss)


@setting()
def gradient_scaler(world: World) -> Training:
    """Mixed precision with a GradScaler, which skips steps that overflow."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    kind = world.device.partition(":")[0]
    scaler: Any = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=4)

    def step(length: int) -> Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = language_loss(world, model, length)
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
    return language(world, model)


@setting()
def optimizer_in_backward(world: World) -> Training:
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = Scored().to(world.device)
    each: dict[Tensor, torch.optim.Optimizer] = {
        p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()
    }

    def at_once(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    parameter: Any
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(at_once)

    def step(length: int) -> Tensor:
        loss = language_loss(world, model, length)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Training(roots=[model], step=step)


@setting()
def sam(world: World) -> Training:
    """SAM: forward and backward, a step uphill, forward and backward again."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> Tensor:
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

    def step(length: int) -> Tensor:
        ids = world.ids(length)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = next_token_loss(model(ids), ids)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        found: Tensor = optimizer.step(closure)
        optimizer.zero_grad()
        return found.detach()

    return Training(roots=[model], step=step)


@setting()
def two_backwards(world: World) -> Training:
    """Two losses of one forward, each with a backward of its own (retain_graph)."""
    model = Scored()

    def loss(length: int) -> Any:
        ids = world.ids(length)
        logits = model(ids)
        loss = next_token_loss(logits, ids)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return 0.1 * logits.square().mean()

    return world.train(model, loss)


# ------------------------------------------------------------------ the run


@setting()
def evaluation_between(world: World) -> Training:
    """Evaluation in between: under no_grad, and once in training mode."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> Tensor:
        loss = world.descend(optimizer, language_loss(world, model, length))
        if next(steps) % 3 == 2:
            model.eval()
            with torch.no_grad():
                loss = loss + language_loss(world, model, 80)
            with torch.inference_mode():
                loss = loss + language_loss(world, model, 40).clone()
            model.train()
            with torch.no_grad():
                loss = loss + language_loss(world, model, 60)
        return loss.detach().clone()

    return Training(roots=[model], step=step)


@setting()
def curriculum(world: World) -> Training:
    """Lengths that grow from step to step."""
    model = Scored()
    steps = iter(range(10_000))

    def loss(length: int) -> Tensor:
        if length < 80:  # the longest is asked for beforehand, to find the budget
            length = min(80, 16 + 2 * next(steps))
        return language_loss(world, model, length)

    return world.train(model, loss)


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

    def step(length: int) -> Tensor:
        is_due[0] = next(steps) % 8 == 7
        with contextlib.suppress(KeyboardInterrupt):
            return world.descend(optimizer, language_loss(world, model, length))
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

    def between(number: int, sessions: Sequence[Session]) -> None:
        if number == 12:
            sessions[0].load_state_dict(copy.deepcopy(sessions[0].state_dict()))

    return language(world, Scored(), between=between)


@setting()
def weights_saved_and_loaded(world: World) -> Training:
    """Weights and optimizer are saved, and loaded again, in mid-training."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> Tensor:
        if next(steps) % 8 == 7:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return world.descend(optimizer, language_loss(world, model, length))

    return Training(roots=[model], step=step)


@setting()
def copied(world: World) -> Training:
    """The attached model is deep-copied and pickled; the copies are trained a step."""
    model = Scored().to(world.device)
    optimizer = world.adamw(model)
    steps = iter(range(10_000))

    def step(length: int) -> Tensor:
        loss = world.descend(optimizer, language_loss(world, model, length))
        if next(steps) % 4 == 1:
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                other = language_loss(world, twin, length)
                other.backward()  # type: ignore[no-untyped-call]
                loss = loss + other.detach()
            del twin, other
            gc.collect()  # models are in rings: else they go whenever it comes
        return loss

    return Training(roots=[model], step=step)


@setting()
def compiled_layers(world: World) -> Training:
    """Each layer compiled by itself (backend aot_eager)."""
    model = Scored(dropout=0.0)
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=True)
    return language(world, model)


@setting("refused", "compiled as a whole")
def compiled_model(world: World) -> Training:
    """The model compiled as a whole."""
    model = Scored(dropout=0.0)
    model.compile(backend="aot_eager", dynamic=True)
    return language(world, model)
