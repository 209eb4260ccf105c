"""Small equal blocks in a row: a model whose own work hardly hides the library's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mimose.bench.zoo import Output
from mimose.planners import Plan, PlanningProblem
from mimose.planners.timeline import judge


class Block(nn.Module):
    """Two linear layers, inside `factor` times as wide, and a residual."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, factor * width)
        self.narrow = nn.Linear(factor * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to the same shape."""
        changed: torch.Tensor = self.narrow(torch.relu(self.wide(states)))
        return states + changed


class Blocks(nn.Module):
    """Blocks one behind another, and a loss of one number."""

    def __init__(self, n_blocks: int, width: int, factor: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, factor) for _ in range(n_blocks))

    def forward(self, states: torch.Tensor) -> Output:
        """Map (rows, width) to a loss."""
        for block in self.blocks:
            states = block(states)
        return Output(loss=states.sum())


class Told:
    """A planner that does what it is told: see `choice`."""

    name = "told"

    def __init__(self) -> None:
        self.choice: Sequence[int] = ()
        """0 to keep and 1 to recompute, event by event; empty to keep all."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make the plan; its budget is not read."""
        choice = torch.tensor(self.choice or [0] * len(problem.events)).numpy()
        return judge(problem, choice, planner=self.name)
