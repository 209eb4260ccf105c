"""Ranks that agree on plans, and ranks that wait for each other.

Note: [Agreement]
A recomputation runs a layer's forward again, with its communication. So if a layer's
forward communicates, all ranks must recompute the same calls, and each to the same
point: the last needed tensor, or the end, as in measured and compared ones. Lengths,
readings and cost models differ by rank, so plans differ too. Before each forward the
ranks exchange one small vector and take the maximum of each element: whether a rank has
failed, has no plan, or measures; a hash of its layer calls and its negative, so that
the maxima show whether all are equal; which layers it keeps under any plan, and which
it has never compared; its actions.

- If one has failed, all raise.
- If one has no plan, or a plan for other layer calls, all recompute everything.
- Otherwise each layer call gets the action that holds least among all ranks' actions.
  So no rank holds more than under its own plan: what a recomputation brings back for a
  moment, its own plan would have held all the time.

Each forward has an exchange. With exchanges only on cache misses, a rank with a hit
would take no part in one. After an error in the middle of a forward nothing can be
agreed on, because ranks that wait for this one cannot answer. It raises, and runs
nothing again.
"""

from __future__ import annotations

import contextlib
import gc
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn

from mimose.arguments import check_integer
from mimose.cost.learner import Learner
from mimose.cost.problem import Memory
from mimose.exactness.layer import Layer
from mimose.exceptions import (
    InfeasibleBudgetError,
    MimoseError,
    NotRecomputableError,
    OtherRankError,
    first_line,
)
from mimose.model.sharding import communicates, is_sharded
from mimose.planners import Menu
from mimose.policy.decision import Decision, without_plan
from mimose.policy.policy import Policy
from mimose.records import AgreementUse
from mimose.torch_private import group_timeout
from mimose.types import StepInput

_OTHERS_UNPLANNED = "another rank has no plan for its step, or one for other layers"
KEPT_ELSEWHERE = "another rank keeps it"
"""Why a layer is kept that this rank could recompute."""
_LEAST_CALLS = 256
_CALLS_A_LAYER = 8
"""The ranks cannot agree on a plan for more layer calls."""
_N_HEAD = 4
"""Elements before those for each layer: no plan, measures, the hash of the calls and
its negative."""
_side: tuple[Any, Any] | None = None
"""The default group, and the group for agreement."""


def n_ranks() -> int:
    """Return the number of ranks that this process knows."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def own_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Args:
        rank: None to ask `torch.distributed`.
        world_size: As well.

    Raises:
        ValueError: They are no integers, or the rank is not below their number.
    """
    if rank is None:
        rank = distributed.get_rank() if n_ranks() > 1 else 0
    size = n_ranks() if world_size is None else world_size
    world_size = check_integer("world_size", size)
    rank = check_integer("rank", rank, 0)
    if rank >= world_size:
        msg = f"rank must be at least 0 and below {world_size} ranks, got {rank}"
        raise ValueError(msg)
    return rank, world_size


def find_ranks(agree: Any, modules: Sequence[nn.Module]) -> Ranks | None:
    """Return the ranks to agree with; None if there is no need to agree.

    If a layer waits for other ranks, all ranks must call this at the same place,
    because it makes a separate group on the CPU. (On an accelerator the host would wait
    for the device, and the model's own group may be busy in a backward.) One group
    serves all sessions of a process, with the timeout of the default group.

    Args:
        agree: ``"auto"``, None for none, or the group of ranks that run the same.
        modules: The layers.
    """
    if agree is None:
        return None
    if agree != "auto":
        everyone = frozenset(range(len(modules)))
        several = n_ranks() > 1 and distributed.get_world_size(agree) > 1
        return Ranks(agree, everyone, len(modules)) if several else None
    waiting = _waiting(modules) if n_ranks() > 1 else {}
    if not waiting:
        return None
    return Ranks(_side_group(), frozenset(waiting), len(modules))


def _side_group() -> Any:
    global _side
    world = distributed.group.WORLD
    if _side is None or _side[0] is not world:
        timeout = group_timeout(world)
        _side = world, distributed.new_group(backend="gloo", timeout=timeout)
    return _side[1]


def waiting_group(model: nn.Module, ranks: Ranks | None) -> Any:
    """Return the group of the ranks that must run as many forwards as this one.

    Ranks of DDP need not: only the backward that reduces gradients communicates. All
    ranks must call this at the same place.

    Args:
        model: The model.
        ranks: The ranks that agree on plans.

    Returns:
        None if no other rank waits.
    """
    if ranks is not None or n_ranks() < 2:
        return None if ranks is None else ranks.group
    is_waiting = any(map(is_sharded, model.modules())) or communicates(model)
    return _side_group() if is_waiting else None


def most_of_ranks(find: Callable[[], int], group: Any) -> int:
    """Return the largest number of all ranks; an error on one is an error on all.

    Args:
        find: Returns this rank's number.
        group: What `waiting_group` returned.

    Raises:
        OtherRankError: Another rank failed. (Or `InfeasibleBudgetError`.)
        Exception: What `find` raised.
    """
    own, error = 0, None
    try:
        own = find()
    except Exception as failed:  # raised after the exchange
        error = failed
    found: list[Any] = [None] * distributed.get_world_size(group)
    with _answered():
        described = None if error is None else _described(error)
        distributed.all_gather_object(found, (own, described), group=group)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(found):
        if failure:
            _raise_other(distributed.get_global_rank(group, rank), failure)
    return max(int(number) for number, _ in found)


def exchange(
    numbers: Sequence[float], error: Exception | None = None
) -> NDArray[np.float64]:
    """Return (n_ranks, n_numbers) the numbers of all ranks, which all call this.

    Args:
        numbers: (n_numbers,) This rank's.
        error: Why this rank has none; all ranks raise it.

    Raises:
        MimoseError: There is no other rank, or one has ended, or does not answer.
        OtherRankError: Another rank failed. (Or `InfeasibleBudgetError`.)
        Exception: `error`.
    """
    if n_ranks() < 2:
        msg = (
            "ranks cannot exchange what fits, because there is no process group of "
            "several ranks: call init_process_group before the first batch is drawn"
        )
        raise MimoseError(msg)

    def fail() -> int:
        if error is not None:
            raise error
        return 0

    own = torch.tensor([error is not None, len(numbers), *numbers], dtype=torch.float64)
    head = [torch.empty_like(own[:2]) for _ in range(distributed.get_world_size())]
    group = _side_group()
    with _answered():
        distributed.all_gather(head, own[:2].clone(), group=group)
    failed, sizes = torch.stack(head).unbind(1)
    if failed.any():
        most_of_ranks(fail, group)
    if (sizes != sizes[0]).any():
        msg = (
            f"the ranks exchange {[int(n) for n in sizes]} numbers, because their data "
            f"differ: give all ranks the same lengths, or names of lengths"
        )
        raise MimoseError(msg)
    found = [torch.empty_like(own[2:]) for _ in head]
    with _answered():
        distributed.all_gather(found, own[2:].clone(), group=group)
    gathered: NDArray[np.float64] = torch.stack(found).numpy()
    return gathered


class Ranks:
    """The ranks that a session agrees with: see Note: [Agreement].

    Args:
        group: Their group.
        waiting: The indices of the layers whose forward waits for them.
        n_layers: The number of layers.

    Attributes:
        group: Their group.
        waiting: The indices of the layers whose forward waits for them.
    """

    def __init__(self, group: Any, waiting: frozenset[int], n_layers: int) -> None:
        self.waiting = waiting
        self.group = group
        self._n_ranks = int(distributed.get_world_size(group))
        self._most_calls = max(_LEAST_CALLS, _CALLS_A_LAYER * n_layers)
        self._n_values = _N_HEAD
        self._n_agreed = _N_HEAD + 2 * n_layers + self._most_calls
        """Numbers in each exchange, after `meet` has shown equal layers."""
        self._is_due = False
        self._n_exchanges = self._n_changed = 0
        self._seconds = 0.0

    def use(self) -> AgreementUse:
        """Return counts and time of the exchanges."""
        n_exchanges, n_changed = self._n_exchanges, self._n_changed
        return AgreementUse(self._n_ranks, n_exchanges, self._seconds, n_changed)

    def restrict(self, layers: Sequence[Layer], learner: Learner) -> None:
        """Allow only `keep` and `recompute` for layers that wait for other ranks.

        Finer actions decide in each call what they do, on each rank separately.

        Args:
            layers: The layers.
            learner: Records the allowed actions.
        """
        menu = learner.model.menu
        finer = menu.names[1:-1]
        for layer in layers:
            if layer.index in self.waiting:
                layer.wait_for_ranks(finer)
                if finer:
                    learner.restrict(layer.index, (menu.names[0], menu.names[-1]))

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Send an error to the other ranks, if they wait for an exchange."""
        self._is_due = True
        try:
            yield
        except Exception as error:
            if self._is_due:
                with contextlib.suppress(MimoseError):  # this rank has its own
                    self._reduced([1])
                    self._gathered(_described(error))
            raise

    def check_same_setup(self, description: Sequence[str]) -> None:
        """Check at the start of the session that all ranks plan the same.

        Args:
            description: Lines that must be equal on all ranks.

        Raises:
            MimoseError: They are not.
            OtherRankError: Another rank could not attach.
        """
        own = _hash(tuple(description))
        largest, minus_least, *_ = self._maxima([own, -own])
        if largest != -minus_least:
            _raise_unlike(self._gathered(list(description)))
        self._n_values = self._n_agreed

    def agree(
        self,
        decision: Decision,
        step_input: StepInput,
        memory: Memory,
        *,
        part: int,
        is_measured: bool,
        layers: Sequence[Layer],
        menu: Menu,
        policy: Policy | None,
    ) -> Decision:
        """Return this rank's decision after the exchange with the others.

        Args:
            decision: Its own decision.
            step_input: The step's input.
            memory: What is held, and the budget.
            part: The index of the forward in its window.
            is_measured: Whether the step is measured.
            layers: The layers; those that another rank keeps are kept from now on.
            menu: The actions in use.
            policy: Makes a decision from actions; None for a baseline, which does the
                same on all ranks.

        Raises:
            InfeasibleBudgetError: Another rank's budget cannot be kept.
            OtherRankError: Another rank has failed for another reason.
            MimoseError: Another rank has ended, or does not answer.
        """
        chosen = decision.chosen
        if chosen is not None and len(chosen.calls) > self._most_calls:
            why = f"more than {self._most_calls} calls of layers make up a step"
            decision, chosen = without_plan(why), None
        own: tuple[int, ...] = ()
        calls = 0
        if chosen is not None:
            own = tuple(map(menu.names.index, chosen.plan.actions))
            calls = _hash((chosen.calls, chosen.between, part))
        head = [int(chosen is None), int(is_measured), calls, -calls]
        kept_here = [int(layer.is_kept) for layer in layers]
        fresh_here = [int(not (layer.is_compared or layer.is_kept)) for layer in layers]
        found = self._maxima([*head, *kept_here, *fresh_here, *own])
        unplanned, whole, largest, minus_least, *body = found
        kept, fresh = body[: len(layers)], body[len(layers) : 2 * len(layers)]
        for layer, is_kept in zip(layers, kept, strict=True):
            if is_kept and not layer.is_kept:
                layer.keep(KEPT_ELSEWHERE)
        agreed = decision
        if policy is not None and chosen is not None:
            made = None
            if not unplanned and largest == -minus_least:
                names = {layer.name for layer in layers if layer.is_kept}
                least = zip(chosen.calls, body[2 * len(layers) :], strict=False)
                wanted = tuple(
                    0 if call.rpartition("#")[0] in names else index
                    for call, index in least
                )
                actions = tuple(menu.names[index] for index in wanted)
                made = decision
                if wanted != own:
                    made = policy.imposed(step_input, decision, memory, actions)
            agreed = made or without_plan(_OTHERS_UNPLANNED)
            self._n_changed += agreed is not decision
        recomputed = [not is_kept for is_kept in kept]
        if agreed.chosen is not None:
            recomputed = [
                any(action != menu.names[0] for action in actions)
                for actions in agreed.chosen.by_layer
            ]
        return replace(agreed, is_whole=bool(whole) or any(compress(fresh, recomputed)))

    def _maxima(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks of each number."""
        is_error, *found = self._reduced([0, *values])
        if is_error:
            described = self._gathered(None)
            rank = next(rank for rank, each in enumerate(described) if each)
            _raise_other(distributed.get_global_rank(self.group, rank), described[rank])
        return found

    def _gathered(self, own: Any) -> list[Any]:
        """Return the objects of all ranks."""
        with _answered():
            found: list[Any] = [None] * self._n_ranks
            distributed.all_gather_object(found, own, group=self.group)
        return found

    def _reduced(self, values: Sequence[int]) -> list[int]:
        self._is_due = False
        vector = torch.zeros(1 + self._n_values, dtype=torch.int64)
        vector[: len(values)] = torch.tensor(values)
        began = time.perf_counter()
        with _answered():
            distributed.all_reduce(
                vector, op=distributed.ReduceOp.MAX, group=self.group
            )
        self._seconds += time.perf_counter() - began
        self._n_exchanges += 1
        return vector.tolist()


def _hash(what: object) -> int:
    """Return a hash above 0 that is the same in every process."""
    return 1 + zlib.crc32(repr(what).encode())


def _described(error: Exception) -> dict[str, Any]:
    described: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, InfeasibleBudgetError):
        described["numbers"] = error.budget_bytes, error.least_peak_bytes, error.holders
        described["advice"] = error.advice
    return described


def _raise_other(rank: int, described: dict[str, Any]) -> NoReturn:
    if "numbers" in described:
        budget, least, holders = described["numbers"]
        advice = f"This is on rank {rank}, so all ranks stop. {described['advice']}"
        raise InfeasibleBudgetError(budget, least, holders, advice.rstrip())
    raise OtherRankError(rank, described["kind"], described["text"])


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Explain errors of the communication inside it.

    Raises:
        MimoseError: Another rank did not answer, or there is no process group.
    """
    if not distributed.is_initialized():  # the group object outlives it
        msg = (
            "the ranks cannot agree on this step, because the process group was "
            "destroyed: detach the session before destroy_process_group(), and attach "
            "again after the next init_process_group()"
        )
        raise MimoseError(msg)
    try:
        yield
    except RuntimeError as error:
        msg = (
            f"the ranks could not agree on this step, because another rank has ended "
            f"or did not answer in time: {first_line(error)}. See that rank's own error"
        )
        raise MimoseError(msg) from error


def _raise_unlike(found: Sequence[list[str]]) -> NoReturn:
    """Raise an error that says where two ranks differ.

    Raises:
        MimoseError: Always.
    """
    rank = next(rank for rank, lines in enumerate(found) if lines != found[0])
    pairs = zip_longest(found[0], found[rank], fillvalue="nothing")
    one, another = next((a, b) for a, b in pairs if a != b)
    msg = (
        f"the ranks cannot agree, because they plan different things: rank 0 of the "
        f"group has {one}, rank {rank} has {another}. Attach with the same arguments "
        f"to the same model on all ranks. If ranks run different parts of a model, "
        f"give attach(agree=...) the group of the ranks that run the same part"
    )
    raise MimoseError(msg)


# ------------------------------------------------------------------ who waits


def _waiting(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Return the indices of layers whose forward waits for other ranks, and why."""
    found = enumerate(map(communicates, modules))
    return {index: why for index, why in found if why}


def later_waits(
    agree: Any,
    model: nn.Module,
    names: Sequence[str],
    modules: Sequence[nn.Module],
    ranks: Ranks | None,
) -> Callable[[], None] | None:
    """Return a check for layers that wait for other ranks only since `attach`.

    It checks in the first forward, and again after `fully_shard` was called on the
    model or a layer. Ranks have the same model, so all of them raise.

    Args:
        agree: As for `find_ranks`.
        model: The model.
        names: The names of the layers.
        modules: The layers.
        ranks: The ranks that agree on plans.

    Returns:
        None if the user has chosen who agrees.
    """
    if agree != "auto" or not distributed.is_available():
        return None
    known = frozenset[int]() if ranks is None else ranks.waiting
    seen: tuple[type, ...] = ()

    def check() -> None:
        nonlocal seen
        kinds = tuple(map(type, (model, *modules)))  # `fully_shard` replaces them
        if n_ranks() < 2 or kinds == seen:
            return
        for index, why in _waiting(modules).items():
            if index not in known:
                msg = (
                    f"the layer {names[index]!r} waits for other ranks ({why}), but it "
                    f"did not when the session began, so the ranks have not agreed on "
                    f"what is recomputed and would wait for each other forever: call "
                    f"detach(), and attach on all ranks after init_process_group, "
                    f"fully_shard, parallelize_module and convert_sync_batchnorm"
                )
                raise MimoseError(msg)
        seen = kinds

    return check


def why_waits(root: nn.Module, layers: Sequence[Layer], *, with_backward: bool) -> str:
    """Return why other ranks wait for a forward of the model; "" if none does.

    Args:
        root: The model.
        layers: Its layers. If ranks agree, an exchange is part of each forward.
        with_backward: Whether its backward counts too.
    """
    if n_ranks() < 2:
        return ""
    for name, module in root.named_modules():
        if is_sharded(module):
            return f"{name or 'the model'} is sharded over the ranks (fully_shard)"
    why = communicates(root)
    if not why and any(layer.waits for layer in layers):
        why = "the ranks agree on each forward"
    if not why and with_backward and ddp_around(root) is not None:
        why = "a DistributedDataParallel holds the model"
    return why


def ddp_around(root: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the wrapper that reduces a model's gradients, if there is one.

    It is searched among all live objects, because the model does not refer to it.

    Args:
        root: The model.
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.parallel.DistributedDataParallel):
            with contextlib.suppress(AttributeError):  # its constructor has failed
                if any(module is root for module in thing.modules()):
                    wrapper: nn.parallel.DistributedDataParallel = thing
                    return wrapper
    return None


_FINAL = "_mimose_final"
"""Attribute of an error whose text already says that nothing is run again."""


def is_final(error: BaseException) -> bool:
    """Whether an error already says that nothing is run again."""
    return hasattr(error, _FINAL)


def mark_final(error: BaseException, what: str, why: str, numbers: str) -> None:
    """Add to an error's text that nothing is run again, and what to do.

    Args:
        error: The error, about to be raised.
        what: What is not run again.
        why: Why other ranks wait for it.
        numbers: A sentence with what is held, and the budget.
    """
    said = str(error) or type(error).__name__
    if isinstance(error, NotRecomputableError):
        said = error.summary
    text = (
        f"{said}\nmimose does not run {what} again on this rank alone, because {why} "
        f"and other ranks would wait for it. {numbers} If memory ran out, give "
        f"attach() a lower budget, else the other layers by attach(layers=...), so "
        f"that this one is kept. Then start all ranks again from the last saved state"
    )
    error.args = (text, *error.args[1:])
    vars(error)[_FINAL] = True
