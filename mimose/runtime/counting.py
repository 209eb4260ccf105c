"""FLOPs of recomputations: counted until they are known, then told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from mimose.cost.costs import exact_cost
from mimose.cost.learner import Learner
from mimose.exactness.unit import Unit
from mimose.inputs.families import digest, family_key
from mimose.inputs.shapes import argument_tensors, call_shape
from mimose.memory.marks import StorageTracker, compiled_flops
from mimose.torch_private import StopRecomputation
from mimose.types import CostOf, OnRecompute

AddFlops: TypeAlias = Callable[[int], None]
"""Takes the FLOPs of one recomputation."""


class RecomputationFlops:
    """Tells what each recomputation computes.

    Args:
        learner: Learns FLOPs by family and sizes, and holds those known exactly.
        device: The model's.
    """

    def __init__(self, learner: Learner, device: torch.device) -> None:
        self._learner = learner
        self._device = device

    def unplanned(
        self,
        add: AddFlops,
        unit: Unit,
        key: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> OnRecompute:
        """Tell the FLOPs of a recomputation of which no plan speaks.

        Counting takes time for every operator, so it ends once they are known. A
        first call is counted: it does not stop early.
        """
        if unit.is_compiled or not unit.is_compared or not self._learner.model.has_room:
            return self.counted(add, None, unit, key, args, kwargs)
        shape = call_shape(args, kwargs)
        alike = family_key(key, shape, self._device)
        family = digest((alike, unit.index, "unplanned"))
        cost_of = family, self._learner.model.menu.least, shape.sizes
        flops = exact_cost(self._learner.model, cost_of)
        if flops is None:
            return self.counted(add, cost_of, unit, key, args, kwargs)

        def run(forward: Callable[[], Any], _: Sequence[torch.Tensor]) -> Any:
            add(flops)
            return forward()

        return run

    def counted(
        self,
        add: AddFlops,
        known_as: CostOf | None,
        unit: Unit,
        key: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> OnRecompute:
        """Count a recomputation that stops early, where its FLOPs are not known.

        The early stop leaves out what comes after the last tensor that is needed, so
        these are not the forward's FLOPs. Compiled layers do not stop early, nor does a
        first call, so what that takes is not learned; nor is what failed half way.
        """
        learns = known_as is not None and unit.is_compared
        unseen = self.unseen(unit, key, args, kwargs)

        def learn(flops: int) -> None:
            if learns and known_as is not None:
                self._learner.absorb_cost(known_as, flops)

        def run(forward: Callable[[], Any], _: Sequence[torch.Tensor]) -> Any:
            flops = unseen()
            if flops is not None:
                add(flops)
                learn(flops)
                return forward()
            tracker = StorageTracker()
            try:
                with tracker:
                    output = forward()
            except StopRecomputation:  # all that was needed is there
                learn(tracker.flops)
                raise
            else:
                learn(tracker.flops)
                return output
            finally:
                add(tracker.flops)

        return run

    def unseen(
        self, unit: Unit, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], int | None]:
        """Return what tells, in backward, FLOPs that cannot be counted as they run.

        It tells None where they can. A unit's first call may show that they cannot.
        """
        if unit.is_kept:
            return lambda: 0 if unit.is_compiled else None
        if not unit.is_compiled:
            return lambda: unit.found_flops if unit.is_compiled else None
        flops = self.of_compiled(unit, key, args, kwargs)
        return lambda: flops

    def of_compiled(
        self, unit: Unit, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        """Estimate what a compiled layer's forward computes.

        Args:
            unit: The layer.
            key: Equal for layers that cost the same.
            args: What it is called with.
            kwargs: What it is called with by name.
        """
        del key
        tensors = [tensor for _, tensor in argument_tensors(args, kwargs)]
        return compiled_flops(unit.module, tensors)
