"""PyTorch's AutoSAC: two integer programs choose which operators' results are kept.

The first decides how much of its activations each layer discards, the second which of
its operators are redone for that. Both rest on a step on the longest batch that is
followed without memory or device (`FakeTensorMode`), so this is a static plan: of
operators, where ours is of whole layers.

Source: `torch.distributed._tools`: `SACEstimator`, `MemTracker`, `RuntimeEstimator`,
`sac_milp` and `get_optimal_checkpointing_policy_per_module`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointPolicy

from mimose.bench.child import RunFailedError
from mimose.bench.grid.selective import Policy, Selective, policy_of
from mimose.bench.grid.strategies import Applied, Setup
from mimose.watch.units import find_units

_NEEDED = ("pulp", "pwlf")
_TIME_MODEL = "operator-level-cost-model"
_GIB = 2**30


def why_no_auto_sac(kind: str) -> str:
    """Return why it cannot run on a kind of device; nothing if it can."""
    if kind != "cuda":
        return "its time model (torch.distributed._tools.RuntimeEstimator) needs CUDA"
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


def auto_sac(setup: Setup) -> Applied:
    """Apply what the programs choose for the longest batch.

    Raises:
        RunFailedError: It cannot follow the model, or finds nothing within the budget.
    """
    from torch.distributed._tools.ilp_utils import parse_module_info
    from torch.distributed._tools.sac_ilp import sac_milp

    name = type(setup.model).__name__
    layers = {
        f"{name}.{path}": layer for path, layer in find_units(setup.model, setup.units)
    }
    budget_bytes = setup.headroom_bytes + _parameter_bytes(setup.model)
    try:
        stats, info = _estimate(setup)
        graph = parse_module_info(info)
        for node in graph.nodes:
            if node["fqn"] not in layers:  # nothing is fitted through two operators
                node["n_segments"] = 0
        discarded, _, peak_bytes = sac_milp(
            graph, memory_budget=budget_bytes / _GIB, ac_units=[*layers]
        )
    except Exception as error:  # whatever a model makes of being followed
        msg = f"AutoSAC cannot follow {name}: {type(error).__name__}: {error}"
        raise RunFailedError(msg) from error
    if peak_bytes < 0:
        msg = f"AutoSAC finds no plan within {setup.headroom_bytes / 2**20:.0f} MiB"
        raise RunFailedError(msg)
    return Selective(
        (
            (layers[path], _deciding(stats[path], share))
            for path, share in discarded.items()
        ),
        may_mutate=True,
    )


def _estimate(setup: Setup) -> tuple[dict[str, Any], Any]:
    """Follow steps on the longest batch.

    Returns:
        The operators of each module, by its path; and what the first program asks for.
    """
    from torch.distributed._tools.ilp_utils import aggregate_stats
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode() as mode, _keeping_modules(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of fits through few points
        model = _without_memory(setup.model, mode)
        follow = functools.partial(setup.loss, model, setup.longest)
        memory = MemTracker()
        memory.track_external(model)
        with memory:
            torch.autograd.backward(follow())
        model.zero_grad()
        selective = SACEstimator()
        with selective(_TIME_MODEL):
            torch.autograd.backward(follow())
        model.zero_grad()
        times = RuntimeEstimator()
        with times(_TIME_MODEL):
            torch.autograd.backward(follow())
        device = next(model.parameters()).device
        info: Any = aggregate_stats(model, memory, times, selective, device)
    known = {each["fqn"] for each in info["mod_stats"]}
    for calls in info["mod_order"].values():  # each module of the model once
        calls[:] = dict.fromkeys(name for name in calls if name in known)
    return selective.sac_mod_stats, info


@contextlib.contextmanager
def _keeping_modules() -> Iterator[None]:
    """Keep modules that are made in a forward, such as a loss, until its backward."""
    modules: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, _: modules.append(module))
    try:
        yield
    finally:
        hook.remove()


def _without_memory(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return the model with tensors that have sizes, but nothing in them."""
    tensors = (*model.parameters(), *model.buffers())
    fakes = {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
    return copy.deepcopy(model, fakes)


def _parameter_bytes(model: nn.Module) -> int:
    """Return what the programs count beside what a step grows by."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _deciding(stats: Any, discarded: float) -> Callable[[], Policy]:
    """Return what makes a layer's policies, that share of its activations discarded.

    Raises:
        RunFailedError: The second program finds no choice.
    """
    from torch.distributed._tools.sac_ilp import (
        get_optimal_checkpointing_policy_per_module,
    )

    keeps = get_optimal_checkpointing_policy_per_module(stats, 1.0 - discarded)
    if not keeps:
        msg = f"AutoSAC finds no operators that make up {discarded:.0%} of a layer"
        raise RunFailedError(msg)
    return functools.partial(_Decided, stats.func_names, keeps)


class _Decided:
    """Keeps what was decided, operator by operator, in one call of a layer.

    Args:
        names: Of the operators, in the order in which they were estimated.
        keeps: Whether each one's result is kept.
    """

    def __init__(self, names: Sequence[str], keeps: Sequence[int]) -> None:
        self._names = names
        self._keeps = keeps
        self._place = {True: 0, False: 0}

    def __call__(
        self, context: Any, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Return whether this operator's result is kept.

        Raises:
            RuntimeError: It is not the operator that was estimated.
        """
        from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

        del args, kwargs
        if operator in OPS_TO_ALWAYS_SKIP:
            return policy_of(False)
        is_again = bool(context.is_recompute)
        place = self._place[is_again]
        self._place[is_again] += 1
        expected = self._names[place] if place < len(self._names) else "nothing more"
        name = operator._overloadpacket.__name__
        if name != expected:
            msg = (
                f"AutoSAC estimated {expected} as operator {place} of a layer, but it "
                f"is {name}: its choice does not hold for this batch"
            )
            raise RuntimeError(msg)
        return policy_of(bool(self._keeps[place]))
