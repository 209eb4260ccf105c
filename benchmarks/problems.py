"""Made-up planning problems with the proportions of measured layers.

The bytes that an action frees, and its cost, are what a session with ``actions=
"selective"`` had learned of a layer in the middle: of BERT-large, Llama-1B, T5-large
and ViT-huge of `benchmarks.scale` on the hollow card, of GPT-2 and a ResNet of
`benchmarks.proofs.reference`. Everything else is random: the number of layers and their
families, their size and speed, the needs of gaps and heads, which layers do not allow
some actions, and the budget. Costs are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.planners import PlanningProblem, peak_bytes, safest_plan
from mimose.planners.actions import FINE_MENU

ACTIONS = FINE_MENU.names
KINDS = ("layers", "pair", "stages", "mixture")
_MENUS = {2: [0, 4], 3: [0, 1, 4], 5: [0, 1, 2, 3, 4]}
"""Which of the actions a problem of so many has."""
_FREED: Mapping[str, tuple[float, ...]] = {
    "bert": (0.0, 0.293, 0.710, 0.804, 1.0),
    "gpt2": (0.0, 0.402, 0.589, 0.702, 1.0),
    "llama": (0.0, 0.470, 0.793, 0.842, 1.0),
    "t5": (0.0, 0.348, 0.655, 0.940, 1.0),
    "vit": (0.0, 0.327, 0.567, 0.950, 1.0),
    "resnet": (0.0, 0.250, 0.750, 1.000, 1.0),
}
"""By action: bytes freed, in parts of what recomputing frees."""
_COST: Mapping[str, tuple[float, ...]] = {
    "bert": (0.0, 0.121, 0.596, 0.864, 1.0),
    "gpt2": (0.0, 0.193, 0.414, 0.726, 1.0),
    "llama": (0.0, 0.178, 0.674, 0.808, 1.0),
    "t5": (0.0, 0.160, 0.473, 0.830, 1.0),
    "vit": (0.0, 0.146, 0.377, 0.937, 1.0),
    "resnet": (0.0, 0.112, 0.396, 0.582, 1.0),
}
"""By action: cost, in parts of that of recomputing."""
_REBUILT = (0.0, 0.6, 0.7, 0.75, 1.0)
"""By action: the rise of a backward's peak, in parts of what is freed."""
_FAMILIES = tuple(_FREED)


class _Block(NamedTuple):
    """Consecutive equal layers."""

    family: str
    n_calls: int
    layer_bytes: float
    """What a layer holds that keeps everything."""
    seconds: float
    """The seconds of recomputing a layer."""
    weight_bytes: float
    """The bytes of its gradients, which its backward retains."""


def draw_problem(
    rng: np.random.Generator,
    kind: str,
    n_calls: int,
    *,
    n_actions: int = 5,
    jitter: float = 0.0,
    masked: bool = False,
) -> PlanningProblem:
    """Draw a problem with room for everything; `with_budget` puts a budget to it.

    Args:
        rng: What to draw from.
        kind: One of `KINDS`: like layers, an encoder with its decoder, the stages of a
            convolutional net, or any two families in turn.
        n_calls: Calls of the step.
        n_actions: 2, 3 or 5.
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
        table[4] *= 1 + jitter * rng.uniform(-1, 1, (n_calls, len(ACTIONS)))
    table[:4] = np.rint(table[:4])
    allowed = np.ones((n_calls, len(ACTIONS)), dtype=np.bool_)
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
    """Return (5, C, 5): held, forward and backward transient peak, retained, cost."""
    # A family's numbers are its own, whichever of its blocks is asked for.
    own = np.random.default_rng([_FAMILIES.index(block.family), 7])
    layer = block.layer_bytes
    out = layer * own.uniform(0.05, 0.15)
    held = layer - (layer - out) * np.array(_FREED[block.family])
    forward = layer * np.full(len(ACTIONS), own.uniform(1.02, 1.2))
    forward[-1] *= own.uniform(0.5, 1.0)  # it saves nothing on its way
    rebuilt = np.array(_REBUILT) * (held[0] - held)
    backward = layer * own.uniform(0.2, 0.5) + rebuilt
    cost = block.seconds * np.array(_COST[block.family])
    retained = np.full(len(ACTIONS), block.weight_bytes)
    row = np.stack([held, forward, backward, retained, cost])
    return np.repeat(row[:, None], block.n_calls, axis=1)


def _masks(rng: np.random.Generator, blocks: Sequence[_Block]) -> NDArray[np.bool_]:
    """Draw what each call may run under, (C, 5)."""
    # The actions in between are the family's own Pareto set.
    rows = [[True, *(rng.random(3) < 0.7), True] for _ in blocks]
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
