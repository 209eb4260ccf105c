"""A user's training loop, with each step measured from outside the library."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mimose.bench.step_meter import (
    AnyStepMeter,
    MeasuredStep,
    RunningStep,
    budget_meter,
)
from mimose.bench.zoo import Batch, moved


class Loop:
    """Trains a model, whose outputs have a `loss`, with AdamW.

    The optimizer takes a step, and gradients are set to None, after each window of
    batches.
    """

    def __init__(self, model: nn.Module, *, window: int = 1) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.meter: AnyStepMeter = budget_meter(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.window = window
        self._n_steps = 0

    @property
    def state_bytes(self) -> int:
        """What the optimizer's state takes once it is there."""
        return 2 * sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def warm_up(self, batch: Batch) -> int:
        """Pay for what a process's first step maps and imports.

        Returns:
            The bytes held afterwards; gradients and optimizer state are not there.
        """
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)
        other = nn.Linear(8, 8).to(self.device)
        given = torch.rand(8, 8, device=self.device)
        output = checkpoint(other, given, use_reentrant=False)
        output.sum().backward()
        torch.optim.AdamW(other.parameters()).step()
        return self.meter.resting_bytes()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run a forward; return the loss alone, so that the outputs can go."""
        loss: torch.Tensor = self.model(**moved(batch, self.device)).loss
        return loss

    def step(self, batch: Batch) -> MeasuredStep:
        """Train on one batch."""
        step = RunningStep(self.meter, self.device)
        self.forward_and_backward(batch)
        self._n_steps += 1
        if self._n_steps % self.window == 0:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return step.end()

    def forward_and_backward(self, batch: Batch) -> None:
        """Run one micro-step; proofs with another loop replace this."""
        (self.loss(batch) / self.window).backward()  # type: ignore[no-untyped-call]
