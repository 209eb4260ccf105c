"""What Python that is no operator takes of the user's clock.

Each price is in operators of the bare model: the microseconds of a call, divided by the
bare model's for each operator, measured in one run by one command
(``python -m benchmarks.proofs host``, 2026-11-28, torch 2.13, transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import mimose
from benchmarks.sim.hollow import HOST, pass_on_host

__all__ = ["CALLS", "of_checkpointing", "of_session"]

CALLS: Mapping[str, float] = {
    "checkpoint": 40.0,
    "step": 60.0,
    "plan": 150.0,
    "keep": 4.0,
    "recompute": 18.0,
    "selective": 40.0,
    "measure": 60.0,
}
"""By what runs: a region of transformers' checkpointing; a step of a session, and one
whose plan is new; a layer call by its action; one in a step that measures."""
_MEASURES = "collect"


def n_regions(model: nn.Module) -> int:
    """Return how many regions transformers' checkpointing has in a model."""
    return sum(isinstance(part, GradientCheckpointingLayer) for part in model.modules())


def of_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Return what charges a step in which transformers checkpoints every layer."""
    n = n_regions(model)
    return lambda: pass_on_host(n * CALLS["checkpoint"] * HOST.python)


def of_session(session: mimose.Session) -> Callable[[], None]:
    """Return what charges a session's step, between its forward and its backward.

    A record is there as its step has ended: each step is charged for the one before.
    """

    def charge() -> None:
        if not session.records:
            return
        record = session.records[-1]
        names = record.actions
        if record.phase == _MEASURES:
            names = ("measure",) * len(names)
        n = CALLS["step"] + CALLS["plan"] * (not record.cache_hit)
        n += sum(CALLS.get(name, CALLS["selective"]) for name in names)
        pass_on_host(n * HOST.python)

    return charge
