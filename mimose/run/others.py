"""Other ranks that a session agrees with, or that would wait for what it runs again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import distributed, nn

from mimose.decide.policy import Policy
from mimose.learn.learner import Learner
from mimose.planners import Menu
from mimose.run.agreement import Agreement, Alone, Together
from mimose.run.unit import Unit
from mimose.watch.communicating import communicates
from mimose.watch.sharding import is_sharded

_DDP = "is a DistributedDataParallel"
_side: tuple[Any, Any] | None = None
"""The default group, and the group beside it that agrees."""


def make_agreement(
    agree: Any,
    units: Sequence[Unit],
    learner: Learner,
    policy: Policy,
    *,
    plans: bool,
) -> Agreement:
    """Return what makes decisions those of all ranks, where that is needed.

    Units that wait for others run whole: kept or recomputed. What finer actions do in
    a call they settle call by call, each rank for itself.

    Args:
        agree: As `mimose.attach` is given it.
        units: The units.
        learner: Is told which actions they may run under.
        policy: Makes decisions.
        plans: Whether plans are made.
    """
    if agree is None or _n_ranks() < 2:
        return Alone()
    if agree == "auto":
        waiting = [unit for unit in units if communicates(unit.module)]
        if not waiting:
            return Alone()
        group = _side_group()
    else:
        waiting, group = list(units), agree
        if distributed.get_world_size(group) < 2:
            return Alone()
    for unit in waiting:
        unit.waits = True
        unit.excluded.update(between(learner.model.menu))
    restrict(units, learner)
    return Together(group, units, learner, policy, plans=plans)


def between(menu: Menu) -> tuple[str, ...]:
    """Return the actions other than keeping and recomputing a whole unit."""
    return tuple(menu.names[1:-1])


def restrict(units: Sequence[Unit], learner: Learner) -> None:
    """Plan units that wait for others as a whole."""
    menu = learner.model.menu
    if between(menu):
        for unit in units:
            if unit.waits:
                learner.restrict(unit.index, (menu.names[0], menu.names[-1]))


def _side_group() -> Any:
    """Return a group of all ranks on the CPU, where nothing else is sent.

    On an accelerator the host would have to wait for the device otherwise; and the
    model's own group may be busy in a backward. One serves all sessions of a process.
    """
    global _side
    world = distributed.group.WORLD
    if _side is None or _side[0] is not world:
        _side = world, distributed.new_group(backend="gloo")
    return _side[1]


def _n_ranks() -> int:
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def why_forward_waits(root: nn.Module, units: Sequence[Unit] = ()) -> str:
    """Return why other ranks wait for a forward of the model; "" if none does.

    Args:
        root: The model.
        units: Its units; what agrees is part of each forward.
    """
    if _n_ranks() < 2:
        return ""
    for name, module in root.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return f"{name or 'the model'} {_DDP}"
        if is_sharded(module):
            return f"{name or 'the model'} is sharded over the ranks (fully_shard)"
    why = communicates(root)
    if why:
        return why
    if any(unit.waits for unit in units):
        return "the ranks agree on each forward"
    return ""


def why_step_waits(root: nn.Module, units: Sequence[Unit] = ()) -> str:
    """Return why other ranks wait for a forward or a backward; "" if none does.

    A wrapper around the model is looked for among all objects that live: nothing in
    the model tells of it.

    Args:
        root: The model.
        units: Its units.
    """
    why = why_forward_waits(root, units)
    if why or _n_ranks() < 2:
        return why
    for thing in gc.get_objects():
        is_ddp = issubclass(type(thing), nn.parallel.DistributedDataParallel)
        if is_ddp and any(module is root for module in thing.modules()):
            return f"a module around the model {_DDP}"
    return ""


_ALONE = "again on this rank alone"


def is_told_alone(error: BaseException) -> bool:
    """Whether an error says already that nothing is run again."""
    return _ALONE in str(error)


def tell_alone(
    error: BaseException, what: str, why: str, numbers: str, is_memory: bool = True
) -> None:
    """Add to an error's own words that nothing is run again, and what to do.

    Args:
        error: Is about to be raised.
        what: What is not run again.
        why: Why others wait for it.
        numbers: What was held, and the budget.
        is_memory: Whether memory ran out; else a layer did as never before.
    """
    lower = (
        "Give attach() a lower budget, which leaves more free, or use shorter or fewer "
        "inputs; then start"
    )
    advice = lower if is_memory else "Start"
    said = str(error) or type(error).__name__
    text = (
        f"{said}\nmimose does not run {what} {_ALONE}: {why}, so that "
        f"other ranks wait for it or are ahead of it. {numbers} {advice} all ranks "
        f"again, from the last saved state"
    )
    error.args = (text, *error.args[1:])
