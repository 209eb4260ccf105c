"""Made-up planning problems with the proportions of measured layers.

The bytes that an action frees, and its share of a layer's time, were measured for six
architectures on a CPU, at width 256. Everything else is random: the number of layers
and their families, their size and speed, the needs of gaps and heads, which layers do
not allow some actions, and the budget. Costs are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.planners import PlanningProblem, peak_bytes, safest_plan

ACTIONS = (
    "keep",
    "selective",
    "selective10",
    "selective40",
    "selective75",
    "recompute",
)
KINDS = ("layers", "pair", "stages", "mixture")
_MENUS = {2: [0, 5], 3: [0, 1, 5], 6: [0, 1, 2, 3, 4, 5]}
"""Which of the actions a problem of so many has."""
_FREED: Mapping[str, tuple[float, ...]] = {
    "bert": (0.0, 0.510, 0.647, 0.751, 0.957, 1.0),
    "gpt2": (0.0, 0.678, 0.775, 0.873, 0.970, 1.0),
    "llama": (0.0, 0.499, 0.643, 0.774, 0.945, 1.0),
    "t5": (0.0, 0.619, 0.733, 0.847, 0.933, 1.0),
    "vit": (0.0, 0.399, 0.532, 0.864, 0.997, 1.0),
    "resnet": (0.0, 0.250, 0.749, 0.874, 0.999, 1.0),
}
"""By action: bytes freed beyond the layer's output, in parts of what keeping holds."""
_SLOWER: Mapping[str, tuple[float, ...]] = {
    "bert": (0.0, 0.073, 0.17, 0.19, 0.29, 0.47),
    "gpt2": (0.0, 0.113, 0.18, 0.17, 0.31, 0.50),
    "llama": (0.0, 0.035, 0.08, 0.14, 0.22, 0.26),
    "t5": (0.0, 0.034, 0.06, 0.14, 0.24, 0.47),
    "vit": (0.0, 0.042, 0.08, 0.18, 0.27, 0.32),
    "resnet": (0.0, 0.069, 0.14, 0.18, 0.30, 0.38),
}
"""By action: time added to the layer's step, in parts of it."""
_FAMILIES = tuple(_FREED)


class _Block(NamedTuple):
    """Consecutive equal layers."""

    family: str
    n_calls: int
    layer_bytes: float
    """What a layer holds that keeps everything."""
    seconds: float
    """The seconds of a layer's forward and backward."""
    weight_bytes: float
    """The bytes of its gradients, which its backward retains."""


def draw_problem(
    rng: np.random.Generator,
    kind: str,
    n_calls: int,
    *,
    n_actions: int = 6,
    jitter: float = 0.0,
    masked: bool = False,
) -> PlanningProblem:
    """Draw a problem with room for everything; `with_budget` puts a budget to it.

    Args:
        rng: What to draw from.
        kind: One of `KINDS`: like layers, an encoder with its decoder, the stages of a
            convolutional net, or any two families in turn.
        n_calls: Calls of the step.
        n_actions: 2, 3 or 6.
        jitter: By how much the costs and bytes of like layers differ; with 0 they are
            equal, so that many plans cost the same.
        masked: Whether families do without some actions, and single calls must keep
            or must do the least.
    """
    blocks = _blocks(rng, kind, n_calls)
    drawn = [_table(block) for block in blocks]
    table = np.concatenate(drawn, axis=1)
    if jitter:
        table[:3] *= 1 + jitter * rng.uniform(-1, 1, (n_calls, 1))
        table[4] *= 1 + jitter * rng.uniform(-1, 1, (n_calls, 6))
    table[:4] = np.rint(table[:4])
    allowed = np.ones((n_calls, 6), dtype=np.bool_)
    if masked:
        allowed = _masks(rng, blocks)
    menu = _MENUS[n_actions]
    allowed = allowed[:, menu]
    allowed[:, 0] |= ~allowed.any(axis=1)
    held, forward, backward, retained, cost = table
    columns: dict[str, Any] = {
        "held_bytes": held,
        "forward_transient_bytes": forward,
        "backward_transient_bytes": backward,
        "cost": cost,
        "host_bytes": np.zeros_like(cost),
    }
    gaps, gap_transient = _gaps(rng, blocks)
    return PlanningProblem(
        calls=tuple(f"layer.{index}#0" for index in range(n_calls)),
        actions=tuple(ACTIONS[index] for index in menu),
        allowed=allowed,
        backward_retained_bytes=retained[:, 0],
        gap_bytes=gaps,
        gap_transient_bytes=gap_transient,
        start_bytes=float(np.rint(held[:, 0].sum() * rng.uniform(0.2, 2))),
        budget_bytes=np.inf,
        host_budget_bytes=np.inf,
        **{name: column[:, menu] for name, column in columns.items()},
    )


def with_budget(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Put the budget between the least peak (0) and that of keeping all (1)."""
    least = safest_plan(problem).peak_bytes
    cheapest = np.where(problem.allowed, problem.cost, np.inf).argmin(axis=1)
    most = float(peak_bytes(problem, cheapest))
    return replace(problem, budget_bytes=least + share * max(0.0, most - least))


def _blocks(rng: np.random.Generator, kind: str, n_calls: int) -> list[_Block]:
    """Draw which layers follow one another."""
    layer = float(np.exp(rng.uniform(np.log(4), np.log(400)))) * 2.0**20
    seconds = float(np.exp(rng.uniform(np.log(2e-3), np.log(0.2))))
    weights = layer * float(rng.uniform(0.02, 0.5))
    first, other = rng.choice(_FAMILIES, 2).tolist()
    block = _Block(first, n_calls, layer, seconds, weights)
    if kind == "layers":
        return [block]
    if kind == "pair":
        # The decoder's layers have two attentions; its texts are of another length.
        n, more = n_calls // 2, 1.4 * float(rng.uniform(0.3, 2.0))
        sizes = more * layer, more * seconds, 1.3 * weights
        blocks = [block._replace(n_calls=n), _Block(first, n_calls - n, *sizes)]
    elif kind == "stages":
        ends = np.sort(rng.integers(1, n_calls, 3)) if n_calls > 3 else [0, 0, 0]
        blocks = [
            _Block("resnet", n, layer / 2**stage, seconds, weights * 4.0**stage)
            for stage, n in enumerate(np.diff([0, *ends, n_calls]).tolist())
        ]
    else:
        n_turns = int(rng.integers(1, max(2, n_calls // 2 + 1)))
        factor = float(np.exp(rng.uniform(-1.5, 1.5)))
        two = block, _Block(other, 1, layer * factor, seconds * factor, weights)
        parts = np.array_split(np.arange(n_calls), 2 * n_turns)
        blocks = [two[i % 2]._replace(n_calls=len(n)) for i, n in enumerate(parts)]
    return [block for block in blocks if block.n_calls]


def _table(block: _Block) -> NDArray[np.float64]:
    """Return (5, C, 6): held, forward and backward transient peak, retained, cost."""
    # A family's numbers are its own, whichever of its blocks is asked for.
    own = np.random.default_rng([_FAMILIES.index(block.family), 7])
    layer = block.layer_bytes
    out = layer * own.uniform(0.05, 0.15)
    held = layer - (layer - out) * np.array(_FREED[block.family])
    forward = layer * np.full(6, own.uniform(1.02, 1.2))
    forward[-1] *= own.uniform(0.5, 1.0)  # it saves nothing on its way
    # Rebuilt tensor by tensor: all of it is there at once only at the end.
    rebuilt = np.array([0.0, 0.4, 0.5, 0.7, 0.95, 1.0]) * (held[0] - held)
    backward = layer * own.uniform(0.2, 0.5) + rebuilt
    cost = block.seconds * np.array(_SLOWER[block.family])
    cost[1:] *= 1 + own.uniform(-0.1, 0.1, 6)[1:]
    row = np.stack([held, forward, backward, np.full(6, block.weight_bytes), cost])
    return np.repeat(row[:, None], block.n_calls, axis=1)


def _masks(rng: np.random.Generator, blocks: Sequence[_Block]) -> NDArray[np.bool_]:
    """Draw what each call may run under, (C, 6)."""
    # The actions in between are the family's own Pareto set.
    rows = [[True, *(rng.random(4) < 0.7), True] for _ in blocks]
    table = np.repeat(np.array(rows), [block.n_calls for block in blocks], axis=0)
    fate = rng.random(len(table))
    table[fate < 0.05, 1:] = False  # impure: it is kept
    table[fate > 0.97, :-1] = False  # shapes that depend on data: the least
    return table


def _gaps(
    rng: np.random.Generator, blocks: Sequence[_Block]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (C + 1,) retained bytes and transient peaks of gaps."""
    layers = np.concatenate([np.full(b.n_calls, b.layer_bytes) for b in blocks])
    gaps, transient = np.zeros((2, len(layers) + 1))
    gaps[0], transient[0] = 0.1 * layers[0], 0.2 * layers[0]
    between = np.flatnonzero(np.diff(layers)) + 1
    gaps[between] = 0.05 * layers[between]
    transient[between] = 0.3 * layers[between - 1]
    head = layers[-1] * rng.choice([0.1, 0.5, 2.0, 6.0])
    gaps[-1], transient[-1] = 0.5 * head, head
    return np.rint(gaps), np.rint(transient)
