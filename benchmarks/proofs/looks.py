"""What does it cost to look whether a layer is, and reads, what it did?

Of a layer with attributes, `transformers`' for BERT, each look that a cached step takes
is timed by itself, in the thread's own time: at a layer that is recomputed (its
attributes and hooks as it enters, these and its modules as it is recomputed, attributes
once more behind that) and at one that is kept (once for the whole model of 24). What is
told is per 16 modules, and the least of the rounds: a look does the same each time.

    python -m benchmarks.proofs looks
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.proofs.common import Answer, Bar, Settings, count, rows_of
from mimose.bench.rows import Row
from mimose.exact.attributes import Attributes
from mimose.exact.inner_hooks import InnerHooks
from mimose.exact.structure import Structure

QUESTION = "What does it cost to look whether a layer is, and reads, what it did?"
OPTIONS = (count("--rounds", 40, "of each look"),)

_N_LAYERS, _UNIT = 24, 16
_BARS = {"recomputed": 6.0, "kept": 1.0}
"""In µs per 16 modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookRow(Row):
    """One round of one look."""

    layer: str
    """What becomes of it: recomputed or kept."""
    look: str
    round: int
    modules: int
    attributes: int
    times: int
    """In a cached step, of one layer."""
    micros: float
    """Of one layer, each time."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Time every look."""
    rows = rows_of(LookRow, "looks", settings, rounds=options.rounds)
    answer = Answer()
    for layer, most in _BARS.items():
        own = [row for row in rows if row.layer == layer]
        least: dict[str, float] = {}
        for row in own:
            micros = row.times * row.micros * _UNIT / row.modules
            least[row.look] = min(micros, least.get(row.look, micros))
        total = sum(least.values())
        line = {**{f"{look} µs": each for look, each in least.items()}, "µs": total}
        bar = Bar("µs per 16 modules", total, at_most=most)
        answer.add(layer, own, line, [bar], head="layer")
    return answer


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Time them, in turns."""
    layers = nn.ModuleList(_layer() for _ in range(_N_LAYERS))
    modules = list(layers[0].modules())
    attributes, hooks = Attributes(modules), InnerHooks(modules)
    structure, whole = Structure(layers[0]), Structure(layers)
    state = attributes.read()
    looks = (
        ("recomputed", "attributes, entering", 1, attributes.read, 1),
        ("recomputed", "attributes, after", 2, lambda: attributes.differ(state), 1),
        ("recomputed", "containers", 1, attributes.containers, 1),
        ("recomputed", "hooks, entering", 1, hooks.call, 1),
        ("recomputed", "hooks, recomputed", 1, hooks.any, 1),
        ("recomputed", "modules", 1, structure.is_refilled, 1),
        ("kept", "modules and buffers", 1, whole.is_other, _N_LAYERS),
    )
    for index in range(task["rounds"]):
        for layer, look, times, call, n_layers in looks:
            number = 2000 // n_layers
            taken = timeit.timeit(call, timer=time.thread_time, number=number)
            yield {
                "layer": layer,
                "look": look,
                "round": index,
                "modules": len(modules),
                "attributes": len(state),
                "times": times,
                "micros": 1e6 * taken / number / n_layers,
            }


def _layer() -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=128)
    make: Any = BertLayer
    layer: nn.Module = make(config)
    return layer
