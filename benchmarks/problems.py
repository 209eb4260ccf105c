"""Made-up planning problems with the proportions of measured layers.

What a layer's actions free and what they take of its time are those measured of six
architectures on a CPU, at width 256. Around them everything is drawn at random: how
many layers of which families follow one another, how large and how slow they are, what
gaps and heads need, which units do without some actions, and the budget. A step's cost
is in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mimose.planners import PlanningProblem, peak_bytes, safest_plan

ACTIONS = ("keep", "lean", "lean10", "lean40", "lean75", "recompute")
KINDS = ("layers", "pair", "stages", "mixture")
_MIB = 2.0**20
_OF_MENU: Mapping[int, tuple[int, ...]] = {
    2: (0, 5),
    3: (0, 1, 5),
    6: (0, 1, 2, 3, 4, 5),
}
"""Which of the actions a menu of so many has."""

# By action: bytes freed beyond the layer's output, and time added to its step, in parts
# of what keeping holds and takes.
_FREED: Mapping[str, tuple[float, ...]] = {
    "bert": (0.0, 0.510, 0.647, 0.751, 0.957, 1.0),
    "gpt2": (0.0, 0.678, 0.775, 0.873, 0.970, 1.0),
    "llama": (0.0, 0.499, 0.643, 0.774, 0.945, 1.0),
    "t5": (0.0, 0.619, 0.733, 0.847, 0.933, 1.0),
    "vit": (0.0, 0.399, 0.532, 0.864, 0.997, 1.0),
    "resnet": (0.0, 0.250, 0.749, 0.874, 0.999, 1.0),
}
_SLOWER: Mapping[str, tuple[float, ...]] = {
    "bert": (0.0, 0.073, 0.17, 0.19, 0.29, 0.47),
    "gpt2": (0.0, 0.113, 0.18, 0.17, 0.31, 0.50),
    "llama": (0.0, 0.035, 0.08, 0.14, 0.22, 0.26),
    "t5": (0.0, 0.034, 0.06, 0.14, 0.24, 0.47),
    "vit": (0.0, 0.042, 0.08, 0.18, 0.27, 0.32),
    "resnet": (0.0, 0.069, 0.14, 0.18, 0.30, 0.38),
}
FAMILIES = tuple(_FREED)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Block:
    """Like layers in a row."""

    family: str
    n_events: int
    layer_bytes: float
    """Held by a layer that keeps everything."""
    layer_seconds: float
    """Of its forward and backward."""
    weight_bytes: float
    """Of its gradients, which its backward leaves."""


def draw_problem(
    rng: np.random.Generator,
    kind: str,
    n_events: int,
    *,
    n_actions: int = 6,
    jitter: float = 0.0,
    nets_by_action: bool = True,
    masked: bool = False,
) -> PlanningProblem:
    """Draw a problem with room for everything; `with_budget` puts a budget to it.

    Args:
        rng: What to draw from.
        kind: One of `KINDS`: like layers, an encoder with its decoder, the stages of a
            convolutional net, or any two families in turn.
        n_events: Events of the step.
        n_actions: 2, 3 or 6.
        jitter: By how much the costs and bytes of like layers differ; with 0 they are
            equal, so that many plans cost the same.
        nets_by_action: Whether some actions leave a little more behind than others.
        masked: Whether families do without some actions, and single events must keep
            or must do the least.
    """
    blocks = _blocks(rng, kind, n_events)
    tables = [_table(rng, block, nets_by_action) for block in blocks]
    held, forward, backward, net, cost = np.concatenate(tables, axis=1)
    if jitter:
        about = 1 + jitter * rng.uniform(-1, 1, (n_events, 1))
        held, forward, backward = held * about, forward * about, backward * about
        cost = cost * (1 + jitter * rng.uniform(-1, 1, cost.shape))
    allowed = np.ones(cost.shape, dtype=np.bool_)
    if masked:
        allowed = _masks(rng, [block.n_events for block in blocks])
    held, forward, backward, net = np.rint((held, forward, backward, net))
    menu = list(_OF_MENU[n_actions])
    gaps, gap_excess = _gaps(rng, blocks)
    zeros = np.zeros((n_events, n_actions))
    return PlanningProblem(
        events=tuple(f"layer.{index}#0" for index in range(n_events)),
        actions=tuple(ACTIONS[index] for index in menu),
        allowed=_at_least_one(allowed[:, menu]),
        held_bytes=held[:, menu],
        forward_excess_bytes=forward[:, menu],
        backward_excess_bytes=backward[:, menu],
        backward_net_bytes=net[:, menu],
        cost=cost[:, menu],
        gap_bytes=gaps,
        gap_excess_bytes=gap_excess,
        start_bytes=float(np.rint(held[:, 0].sum() * rng.uniform(0.2, 2))),
        optimizer_state_bytes=0.0,
        step_excess_bytes=float(np.rint(net[:, 0].sum() * rng.uniform(0, 1.5))),
        budget_bytes=np.inf,
        host_bytes=zeros,
        host_budget_bytes=np.inf,
    )


def with_budget(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Put the budget between the least peak (0) and that of keeping all (1)."""
    least = safest_plan(problem).peak_bytes
    cheapest = np.where(problem.allowed, problem.cost, np.inf).argmin(axis=1)
    most = float(peak_bytes(problem, cheapest))
    return replace(problem, budget_bytes=least + share * max(0.0, most - least))


def _blocks(rng: np.random.Generator, kind: str, n_events: int) -> list[_Block]:
    """Draw which layers follow one another."""
    layer = float(np.exp(rng.uniform(np.log(4), np.log(400)))) * _MIB
    seconds = float(np.exp(rng.uniform(np.log(2e-3), np.log(0.2))))
    weights = layer * float(rng.uniform(0.02, 0.5))
    first, other = rng.choice(FAMILIES, 2).tolist()
    if kind == "layers":
        return [_block(first, n_events, layer, seconds, weights)]
    if kind == "pair":
        # The decoder's layers have two attentions; its texts are of another length.
        n_encoder = n_events // 2
        longer = float(rng.uniform(0.3, 2.0))
        both = [
            _block(first, n_encoder, layer, seconds, weights),
            _block(
                first,
                n_events - n_encoder,
                1.4 * longer * layer,
                1.4 * longer * seconds,
                1.3 * weights,
            ),
        ]
        return [block for block in both if block.n_events]
    if kind == "stages":
        ends = np.sort(rng.integers(1, n_events, 3)) if n_events > 3 else [0, 0, 0]
        counts = np.diff([0, *ends, n_events]).tolist()
        return [
            _block("resnet", count, layer / 2**stage, seconds, weights * 4.0**stage)
            for stage, count in enumerate(counts)
            if count
        ]
    n_turns = int(rng.integers(1, max(2, n_events // 2 + 1)))
    counts = [len(part) for part in np.array_split(np.arange(n_events), 2 * n_turns)]
    factor = float(np.exp(rng.uniform(-1.5, 1.5)))
    two = (
        _block(first, 1, layer, seconds, weights),
        _block(other, 1, layer * factor, seconds * factor, weights),
    )
    blocks = [replace(two[i % 2], n_events=n) for i, n in enumerate(counts) if n]
    return blocks


def _block(
    family: str, n_events: int, layer: float, seconds: float, weights: float
) -> _Block:
    return _Block(
        family=family,
        n_events=n_events,
        layer_bytes=layer,
        layer_seconds=seconds,
        weight_bytes=weights,
    )


def _table(
    rng: np.random.Generator, block: _Block, nets_by_action: bool
) -> NDArray[np.float64]:
    """Return (5, E, 6): held, forward and backward excess, net and cost."""
    # A family's numbers are its own, whichever of its blocks is asked for.
    own = np.random.default_rng([FAMILIES.index(block.family), 7])
    layer = block.layer_bytes
    out = layer * own.uniform(0.05, 0.15)
    held = layer - (layer - out) * np.array(_FREED[block.family])
    forward = layer * np.full(6, own.uniform(1.02, 1.2))
    forward[-1] *= own.uniform(0.5, 1.0)  # it saves nothing on its way
    working = layer * own.uniform(0.2, 0.5)
    # Rebuilt tensor by tensor: all of it is there at once only at the end.
    rebuilt = np.array([0.0, 0.4, 0.5, 0.7, 0.95, 1.0]) * (held[0] - held)
    net = np.full(6, block.weight_bytes)
    cost = block.layer_seconds * np.array(_SLOWER[block.family])
    cost *= 1 + np.array([0, 1, 1, 1, 1, 1]) * own.uniform(-0.1, 0.1, 6)
    row = np.stack([held, forward, working + rebuilt, net, cost])
    table = np.repeat(row[:, None], block.n_events, axis=1)
    if nets_by_action:
        # Readings are off by a little; where a block begins, something that rebuilding
        # still needs goes later, or sooner.
        table[3] += layer * rng.uniform(0, 0.03, 6) * (rng.random(6) < 0.15)
        table[3, 0, 1:5] += layer * rng.uniform(0, 0.25) * (rng.random() < 0.5)
    return table


def _masks(rng: np.random.Generator, counts: Sequence[int]) -> NDArray[np.bool_]:
    """Draw what each unit may run under, (E, 6)."""
    rows = []
    for n_events in counts:
        allowed = np.ones(6, dtype=np.bool_)
        allowed[1:5] = rng.random(4) < 0.7  # the family's own Pareto set
        rows += [allowed] * n_events
    table = np.array(rows)
    fate = rng.random(len(table))
    table[fate < 0.05, 1:] = False  # impure: it is kept
    table[fate > 0.97, :-1] = False  # shapes that depend on data: the least
    return table


def _at_least_one(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Keep what a smaller menu has left without any action."""
    allowed[:, 0] |= ~allowed.any(axis=1)
    return allowed


def _gaps(
    rng: np.random.Generator, blocks: Sequence[_Block]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (E + 1,) nets and excesses: embeddings, downsampling, a head."""
    layers = np.concatenate([np.full(b.n_events, b.layer_bytes) for b in blocks])
    gaps, excess = np.zeros((2, len(layers) + 1))
    gaps[0], excess[0] = 0.1 * layers[0], 0.2 * layers[0]
    between = np.flatnonzero(np.diff(layers)) + 1
    gaps[between] = 0.05 * layers[between]
    excess[between] = 0.3 * layers[between - 1]
    head = layers[-1] * rng.choice([0.1, 0.5, 2.0, 6.0])
    gaps[-1], excess[-1] = 0.5 * head, head
    return np.rint(gaps), np.rint(excess)
