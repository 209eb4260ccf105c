"""Made-up planning problems with every action: also those that pack and offload.

Made of the problems of `benchmarks.problems`: what a layer has left under ``lean``,
and its input, is pooled, quantized or copied to the host. Where layers end with an
activation and save their own outputs, as those of convolutional nets do, what packing
an input frees depends on the layer before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems import draw_problem
from mimose.planners import PlanningProblem, peak_bytes, safest_plan
from mimose.planners.fewer import with_actions

MENUS = ("whole layers", "tensors", "offload", "lossy")
"""Each with all actions of those before it."""

_LINKS: dict[str, tuple[str, ...]] = {
    "whole layers": ("keep", "recompute"),
    "tensors": ("lean", "lean10", "lean40", "lean75"),
    "offload": ("offload", "offload_input"),
    "lossy": ("pool", "pool4", "quantize", "quantize4"),
}
_LOSSY = frozenset(_LINKS["lossy"])
_ORDER = (
    "keep",
    *_LINKS["tensors"],
    *_LINKS["lossy"],
    *_LINKS["offload"],
    "recompute",
)
_BASE = ("keep", *_LINKS["tensors"], "recompute")
_PACKED = (*_LINKS["lossy"], *_LINKS["offload"])


def draw_whole_menu(
    rng: np.random.Generator,
    kind: str,
    n_events: int,
    *,
    pairs: bool,
    jitter: float = 0.0,
    nets_by_action: bool = True,
    masked: bool = False,
) -> PlanningProblem:
    """Draw a problem of twelve actions, with room for everything.

    Args:
        rng: What to draw from.
        kind: One of `benchmarks.problems.KINDS`.
        n_events: Events of the step.
        pairs: Whether layers save their own outputs, as long as they are not packed.
        jitter: By how much the costs and bytes of like layers differ.
        nets_by_action: Whether some actions leave a little more behind than others.
        masked: Whether families do without some actions.
    """
    base = draw_problem(
        rng,
        kind,
        n_events,
        jitter=jitter,
        nets_by_action=nets_by_action,
        masked=masked,
    )
    output = base.held_bytes[:, -1]
    inputs = np.concatenate((base.gap_bytes[:1], output[:-1]))
    lean, recompute = 1, 5
    left = base.held_bytes[:, lean] - output + inputs
    parts, slower = _packing(rng, kind)
    seconds = base.cost[:, recompute]
    packs = range(len(_PACKED) - 1)

    held = np.array([output + parts[i] * left for i in packs] + [output]).T
    unpacked = np.array([(1 - parts[i]) * left for i in packs] + [0 * left]).T
    like = [lean] * len(packs) + [recompute]
    cost = base.cost[:, like] + np.outer(seconds, slower)
    host = np.zeros_like(held)
    host[:, -2], host[:, -1] = (1 - parts[-1]) * left, inputs
    backward = base.backward_excess_bytes[:, like] + unpacked
    tables = {
        "allowed": base.allowed[:, like],
        "held_bytes": np.rint(held),
        "forward_excess_bytes": base.forward_excess_bytes[:, like],
        "backward_excess_bytes": np.rint(backward),
        "backward_net_bytes": base.backward_net_bytes[:, like],
        "cost": cost,
        "host_bytes": np.rint(host),
    }
    at = [(*_BASE, *_PACKED).index(name) for name in _ORDER]
    joined: dict[str, Any] = {
        name: np.concatenate((getattr(base, name), more), axis=1)[:, at]
        for name, more in tables.items()
    }
    names = np.array(_ORDER)
    saves = np.isin(names, _BASE[:-1]) if pairs else np.zeros(12, np.bool_)
    each = np.ones((n_events, 1), np.bool_)
    return replace(
        base,
        actions=_ORDER,
        lossy=_LOSSY,
        transfer_seconds=np.zeros(0),
        input_bytes=inputs,
        releases_input=np.isin(names, _PACKED) & each,
        saves_output=saves & each,
        **joined,
    )


def with_menu(problem: PlanningProblem, menu: str) -> PlanningProblem:
    """Leave a problem the actions of one of `MENUS`."""
    wanted = {name for link in MENUS[: MENUS.index(menu) + 1] for name in _LINKS[link]}
    at = [i for i, name in enumerate(problem.actions) if name in wanted]
    return with_actions(problem, at)


def with_budgets(
    problem: PlanningProblem, menu: str, share: float, host_share: float | None
) -> PlanningProblem:
    """Put budgets to a problem.

    Args:
        problem: The step.
        menu: Whose least peak the budget is not to go below.
        share: Of the way from there to what keeping everything takes.
        host_share: Of what the host would hold if all was offloaded; None for no limit.
    """
    host = np.inf
    if host_share is not None:
        host = float(host_share * problem.host_bytes.max(axis=1).sum())
    problem = replace(problem, host_budget_bytes=host)
    least = safest_plan(with_menu(problem, menu)).peak_bytes
    cheapest = np.where(problem.allowed, problem.cost, np.inf).argmin(axis=1)
    most = float(peak_bytes(problem, cheapest))
    return replace(problem, budget_bytes=least + share * max(0.0, most - least))


def _packing(
    rng: np.random.Generator, kind: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw what is left of packed bytes, and the time, in parts of a recomputation's.

    Returns:
        (5,) parts of what ``pool``, ``pool4``, ``quantize``, ``quantize4`` and
        ``offload`` pack; (6,) times, the last that of ``offload_input``.
    """
    pooled = rng.uniform(0.6, 0.95) if kind == "stages" else rng.uniform(0.2, 0.5)
    floats = rng.uniform(0.7, 0.95)
    parts = 1 - np.array(
        [
            pooled * 3 / 4,
            pooled * 15 / 16,
            floats * 0.73,
            floats * 0.86,
            rng.uniform(0.8, 1.0),
        ]
    )
    pool, quantize, copies = rng.uniform([0.02, 0.1, 0.0], [0.15, 0.5, 1.5])
    slower = np.array(
        [pool, 0.9 * pool, quantize, 1.1 * quantize, copies, 0.3 * copies]
    )
    return parts, slower
