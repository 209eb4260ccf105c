"""Deferred device checks: flags that the host reads all at once, after the step.

To read a number from an accelerator, the host waits until all queued work is done. So
the flags of a step are read together at the end of its backward: one wait for all
checks, none if there are no checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Answers: TypeAlias = "list[bool]"


class DeviceChecks:
    """Flags on a device, read later.

    Attributes:
        deferred: Flags not read yet, and the functions that take their values.
    """

    def __init__(self) -> None:
        self.deferred: list[
            tuple[Sequence[torch.Tensor], Callable[[Answers], None]]
        ] = []

    def defer(
        self, flags: Sequence[torch.Tensor], then: Callable[[Answers], None]
    ) -> None:
        """Read flags after the step; at once if all are on a CPU.

        Args:
            flags: Tensors of one truth value each.
            then: Called with their values.
        """
        if all(flag.is_cpu for flag in flags):
            then(list(map(bool, flags)))
        else:
            self.deferred.append((flags, then))

    def read(self) -> None:
        """Read all deferred flags."""
        deferred, self.deferred = self.deferred, []
        if not deferred:
            return
        answers = iter(_values([flag for flags, _ in deferred for flag in flags]))
        for flags, then in deferred:
            then([next(answers) for _ in flags])


def _values(flags: Sequence[torch.Tensor]) -> Answers:
    """Read flags from any device, those of accelerators with one copy."""
    away = [index for index, flag in enumerate(flags) if not flag.is_cpu]
    device = flags[away[0]].device
    stacked = torch.stack([flags[i].to(device, non_blocking=True) for i in away])
    values = dict(zip(away, stacked.tolist(), strict=True))
    return [values[i] if i in values else bool(flag) for i, flag in enumerate(flags)]
