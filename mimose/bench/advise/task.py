"""What a process is asked to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model under a method, and where."""

    source: str
    """``module:function`` or a file, as `mimose.bench.advise.source.make` takes it."""
    method: str
    device: str
    dtype: str
    optimizer: str
    threads: int
    seed: int


def training_of(task: Task, model: nn.Module, sample: Any) -> Training:
    """Return a model's training under the task's method, with no session yet."""
    return Training(
        model,
        sample,
        METHODS[task.method],
        device=torch.device(task.device),
        optimizer=task.optimizer,
        dtype=task.dtype,
    )
