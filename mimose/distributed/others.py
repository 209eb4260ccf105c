"""Other ranks that a session agrees with, or that would wait for what it runs again."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from torch import distributed, nn

from mimose.cost.learner import Learner
from mimose.distributed.agreement import Agreement, Alone, Together
from mimose.distributed.exchange import Exchange
from mimose.distributed.meeting import Meeting, n_ranks
from mimose.exactness.unit import Unit
from mimose.exceptions import MimoseError, NotRecomputableError
from mimose.inputs.communicating import communicates
from mimose.inputs.sharding import OwnParameters, is_sharded
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.planners import Menu
from mimose.policy.policy import Policy
from mimose.torch_private import group_timeout

_DDP = "is a DistributedDataParallel"
_side: tuple[Any, Any] | None = None
"""The default group, and the group beside it that agrees."""


class Others(NamedTuple):
    """Ranks that a session agrees with."""

    exchange: Exchange
    """With them."""
    waiting: frozenset[int]
    """The places of the units whose forward waits for them."""


def find_others(
    meeting: Meeting, names: Sequence[str], modules: Sequence[nn.Module]
) -> Others | None:
    """Return the ranks to agree with; None where there is no need to.

    All ranks call this at the same place where a layer of one waits for others: it
    makes a group of them.

    Args:
        meeting: Where ranks meet as they attach.
        names: Of the units.
        modules: The units.

    Raises:
        MimoseError: The ranks do not know of each other yet, or not all wait.
        OtherRankError: Another rank could not attach.
    """
    if meeting.exchange is not None:
        return Others(meeting.exchange, frozenset(range(len(modules))))
    if meeting.agree != "auto":
        return None
    _refuse_too_early(modules)
    if n_ranks() < 2:
        return None
    waiting = _waiting(names, modules)
    if not waiting:
        meeting.pass_by()
        return None
    meeting.wait_for_all(next(iter(waiting.values())))
    return Others(Exchange(_side_group()), frozenset(waiting))


def later_waits(
    meeting: Meeting,
    others: Others | None,
    model: nn.Module,
    found: Sequence[tuple[str, nn.Module]],
) -> Callable[[], None] | None:
    """Return what refuses layers that come to wait later; None where nothing is to.

    Args:
        meeting: Where the ranks have met.
        others: Those that this one agrees with.
        model: The model.
        found: The units, by name.
    """
    if meeting.agree != "auto":
        return None
    known = frozenset() if others is None else others.waiting
    names, modules = [name for name, _ in found], [module for _, module in found]
    return LaterWaits(model, names, modules, known).refuse


def _waiting(names: Sequence[str], modules: Sequence[nn.Module]) -> dict[int, str]:
    """Return the places of units whose forward waits for other ranks, and why."""
    found = {}
    for index, (name, module) in enumerate(zip(names, modules, strict=True)):
        why = communicates(module)
        if why:
            found[index] = f"the layer {name!r} waits for other ranks ({why})"
    return found


class LaterWaits:
    """Refuses layers that have come to wait for other ranks since the session began.

    They are looked at in the first forward, and again once `fully_shard` was called on
    the model or a unit; in all others, and where there is one rank, next to nothing is
    done. Ranks have the same model, so all of them raise.

    Args:
        model: The model.
        names: Of the units.
        modules: The units.
        known: The places of those that ranks agree on.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        known: Container[int],
    ) -> None:
        self._own = OwnParameters(model, modules)
        self._names = names
        self._modules = modules
        self._known = known
        self._n_seen = -1

    def refuse(self) -> None:
        """Look at the units, if they may have changed.

        Raises:
            MimoseError: One waits on which nothing is agreed.
        """
        if n_ranks() < 2:
            return
        self._own.read()
        if self._own.n_read == self._n_seen:
            return
        for index, why in _waiting(self._names, self._modules).items():
            if index not in self._known:
                msg = (
                    f"{why}, and did not when the session began, so the ranks do not "
                    f"agree on what is recomputed and would wait for each other for "
                    f"ever: call detach(), and attach on all ranks behind "
                    f"init_process_group, fully_shard, parallelize_module and "
                    f"convert_sync_batchnorm"
                )
                raise MimoseError(msg)
        self._n_seen = self._own.n_read


def telling(others: Others | None) -> contextlib.AbstractContextManager[None]:
    """Return what tells the other ranks of an error, if there are any."""
    return contextlib.nullcontext() if others is None else others.exchange.telling()


def make_agreement(
    others: Others | None,
    units: Sequence[Unit],
    learner: Learner,
    policy: Policy,
    *,
    plans: bool,
) -> Agreement:
    """Return what makes decisions those of all ranks, where that is needed.

    Units that wait for others run whole: kept or recomputed. What finer actions do in
    a call they settle call by call, each rank for itself. Plans ask the learner which
    actions there are, and after a state was loaded it is told again; a baseline asks
    nobody, so a unit's calls look at `Unit.excluded`.

    Args:
        others: The ranks to agree with.
        units: The units.
        learner: Is told which actions they may run under.
        policy: Makes decisions.
        plans: Whether plans are made.
    """
    if others is None:
        return Alone()
    for unit in units:
        if unit.index in others.waiting:
            unit.waits = True
            unit.excluded.update(between(learner.model.menu))
    restrict(units, learner)
    menu = learner.model.menu
    return Together(others.exchange, units, menu, policy, plans=plans)


def _refuse_too_early(modules: Sequence[nn.Module]) -> None:
    """Refuse batch norm over ranks that do not know of each other yet.

    Raises:
        MimoseError: A launcher has started several, and no group is there.
    """
    is_begun = distributed.is_available() and distributed.is_initialized()
    n_started = os.environ.get("WORLD_SIZE", "1")
    if is_begun or not n_started.isdecimal() or int(n_started) < 2:
        return
    parts = (part for unit in modules for part in unit.modules())
    if any(isinstance(part, nn.SyncBatchNorm) for part in parts):
        msg = (
            f"a layer has a SyncBatchNorm, and {n_started} processes were started, "
            f"which have to agree on what is recomputed, but there is no process group "
            f"yet: attach after torch.distributed.init_process_group()"
        )
        raise MimoseError(msg)


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
    model's own group may be busy in a backward. One serves all sessions of a process,
    and waits as long as the user lets ranks wait.
    """
    global _side
    world = distributed.group.WORLD
    if _side is None or _side[0] is not world:
        timeout = group_timeout(world)
        _side = world, distributed.new_group(backend="gloo", timeout=timeout)
    return _side[1]


def why_forward_waits(root: nn.Module, units: Sequence[Unit] = ()) -> str:
    """Return why other ranks wait for a forward of the model; "" if none does.

    Args:
        root: The model.
        units: Its units; what agrees is part of each forward.
    """
    if n_ranks() < 2:
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
    if why or n_ranks() < 2:
        return why
    for thing in gc.get_objects():
        is_ddp = issubclass(type(thing), nn.parallel.DistributedDataParallel)
        if is_ddp and _holds(thing, root):
            return f"a module around the model {_DDP}"
    return ""


def _holds(wrapper: nn.Module, root: nn.Module) -> bool:
    try:
        return any(module is root for module in wrapper.modules())
    except AttributeError:  # making it has failed, as memory ran out
        return False


_TOLD = "_mimose_told_alone"
"""An error's attribute: it says already that nothing is run again."""
_LESS = (
    "Give attach() a lower budget, which leaves more free, or use shorter or fewer "
    "inputs"
)
_WITHOUT = (
    "Have the layer left out, which is then kept from the first step on: "
    "attach(layers=...) takes the class, or the names, of those to plan for"
)


def is_told_alone(error: BaseException) -> bool:
    """Whether an error says already that nothing is run again."""
    return hasattr(error, _TOLD)


def tell_alone(error: BaseException, what: str, why: str, numbers: str) -> None:
    """Add to an error's own words that nothing is run again, and what to do.

    Args:
        error: Is about to be raised.
        what: What is not run again.
        why: Why others wait for it.
        numbers: What was held, and the budget.
    """
    advice = _LESS if is_out_of_memory(error) else _WITHOUT
    said = str(error) or type(error).__name__
    if isinstance(error, NotRecomputableError):
        said = error.told
    text = (
        f"{said}\nmimose does not run {what} again on this rank alone: {why}, so that "
        f"other ranks wait for it or are ahead of it. {numbers} {advice}; then start "
        f"all ranks again, from the last saved state"
    )
    error.args = (text, *error.args[1:])
    vars(error)[_TOLD] = True
