"""What a process is asked to train, in a form that travels between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STRATEGIES = ("none", "full", "static", "mimose")
"""Keep everything; recompute everything; one plan, made for the longest batch; a plan
for every length."""

LIMITED = ("none", "mimose")
"""Strategies that meet the hard limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Everything that decides what is trained, and in which order."""

    layers: int = 4
    """Transformer blocks."""

    hidden_size: int = 64
    """Width of the encoder; the feed-forward part is four times as wide."""

    heads: int = 1
    """Attention heads. More would multiply time and memory alike."""

    dropout: float = 0.1
    """Of hidden states and of attention."""

    batch_size: int = 16
    """Texts a batch."""

    max_tokens: int = 512
    """Longer texts are cut to this."""

    learning_rate: float = 3e-3
    """Reached after the warm-up; falls linearly from there."""

    warm_up_steps: int = 10
    """Optimizer steps over which the learning rate rises from zero."""

    seed: int = 0
    """Settles weights, the batches' order and dropout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one process is asked to train."""

    run: str
    """Which part of an experiment it belongs to; goes into the rows."""

    strategy: str
    """One of `STRATEGIES`."""

    workload: Workload
    """What is trained."""

    corpus: Path
    """An `EncodedCorpus`, saved."""

    steps: int
    """Length of the training run."""

    budget_bytes: int | None
    """What the strategy may hold; plain training does not heed it."""

    is_limited: bool
    """Whether the system is to enforce the budget."""

    threads: int
    """For torch's operators."""

    date: str
    """When the experiment began; goes into the rows."""


def task_to_json(task: Task) -> dict[str, Any]:
    """Turn a task into plain values."""
    return {**asdict(task), "corpus": str(task.corpus)}


def task_from_json(raw: Mapping[str, Any]) -> Task:
    """Undo `task_to_json`."""
    given = {"workload": Workload(**raw["workload"]), "corpus": Path(raw["corpus"])}
    return Task(**{**raw, **given})
