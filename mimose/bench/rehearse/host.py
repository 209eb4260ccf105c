"""What Python that is no operator takes of the user's clock.

Each price is CPU time, measured in one run by one command (2026-11-28, torch 2.13,
transformers 5.23: ``python -m benchmarks.proofs host --workloads bert-large``), and
taken to be the same on the H200's host. As shares of the bare model's time they would
be five times as high, for an operator takes 5 µs on the hollow card, 23 on the H200:
then `benchmarks.proofs clock` is 13 to 73% too slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from mimose.session import Session
from mimose.sim.hollow import pass_on_host

__all__ = ["CALLS", "of_checkpointing", "of_session"]

_AGAIN = 432e-6
"""A layer's second run, whose operators the clock charges already."""
CALLS: Mapping[str, float] = {
    "checkpoint": 1148e-6 - _AGAIN,
    "step": 1892e-6,
    "plan": 1610e-6,
    "lesson": (837 + 542) * 1e-6,
    "keep": 12e-6,
    "recompute": 982e-6 - _AGAIN,
    "selective": 1706e-6 - _AGAIN,
    "measure": 1507e-6 - _AGAIN - 1892e-6 / 24,
}
"""Seconds by what runs: a region of transformers' checkpointing; a step of a session,
one whose plan is new, one that measures (with its fit); a layer call by its action; one
that is measured."""


def n_regions(model: nn.Module) -> int:
    """Return how many regions transformers' checkpointing has in a model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return sum(isinstance(part, GradientCheckpointingLayer) for part in model.modules())


def of_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Return what charges a step in which transformers checkpoints every layer."""
    n = n_regions(model)
    return lambda: pass_on_host(n * CALLS["checkpoint"])


def of_session(session: Session) -> Callable[[], None]:
    """Return what charges a session's step, between its forward and its backward.

    A record is there as its step has ended: each step is charged for the one before.
    """
    learner, n_measured = session._engine.learner, 0

    def charge() -> None:
        nonlocal n_measured
        if not session.records:
            return
        record = session.records[-1]
        names = record.actions
        seconds = CALLS["step"] + CALLS["plan"] * (not record.cache_hit)
        if learner.n_steps > n_measured:
            n_measured = learner.n_steps
            names = ("measure",) * len(names)
            seconds += CALLS["lesson"]
        seconds += sum(CALLS.get(name, CALLS["selective"]) for name in names)
        pass_on_host(seconds)

    return charge
