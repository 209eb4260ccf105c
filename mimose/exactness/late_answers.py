"""Answers that an accelerator has worked out, read by the host all at once.

Reading a number makes the host wait until the accelerator has done all it was given. So
what is asked during a step is read when its backward has ended: one wait, however much
was asked; and none where nothing was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Answers: TypeAlias = "list[bool]"


class LateAnswers:
    """Asks now, and tells later.

    Attributes:
        asked: What was asked and not answered yet.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[torch.Tensor], Callable[[Answers], None]]] = []

    def ask(
        self, flags: Sequence[torch.Tensor], tell: Callable[[Answers], None]
    ) -> None:
        """Ask for the values of flags; where all are on a CPU, they are read at once.

        Args:
            flags: Tensors of one truth value each.
            tell: Is called with their values.
        """
        if all(flag.is_cpu for flag in flags):
            tell(list(map(bool, flags)))
        else:
            self.asked.append((flags, tell))

    def read(self) -> None:
        """Tell all that was asked since the last time."""
        asked, self.asked = self.asked, []
        if not asked:
            return
        answers = iter(_values([flag for flags, _ in asked for flag in flags]))
        for flags, tell in asked:
            tell([next(answers) for _ in flags])


def _values(flags: Sequence[torch.Tensor]) -> Answers:
    """Read flags from wherever they are, from accelerators by one copy."""
    away = [index for index, flag in enumerate(flags) if not flag.is_cpu]
    device = flags[away[0]].device
    stacked = torch.stack([flags[i].to(device, non_blocking=True) for i in away])
    values = dict(zip(away, stacked.tolist(), strict=True))
    return [values[i] if i in values else bool(flag) for i, flag in enumerate(flags)]
