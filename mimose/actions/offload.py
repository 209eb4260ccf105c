"""Holds on the host what a call saves, or the input of its recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mimose.actions.base import Invocation, Probe
from mimose.actions.host import AwayInput, Host, HostCall
from mimose.actions.recompute import Recompute
from mimose.inputs.call_shape import argument_tensors
from mimose.planners.actions import OFFLOAD_INPUT, RECOMPUTE
from mimose.tensors import is_plain
from mimose.torch_private import saved_names


class OffloadInput(Recompute):
    """Recomputes a call from an input that is held on the host until then.

    The copy to the host starts when the call begins, and runs beside its forward. If
    the operator that made the input has saved it, it stays, because moving it would
    free nothing.

    Args:
        host: Holds the input.
    """

    spec = OFFLOAD_INPUT

    def __init__(self, host: Host) -> None:
        self._host = host

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward, and copy its input to the host."""
        try:
            return super().run(call, probe)
        finally:
            self._host.settle()

    def _send_away(self, call: Invocation, probe: Probe | None) -> AwayInput | None:
        handed = _handed_over(call.args, call.kwargs)
        on_host = None if handed is None else HostCall(self._host).pack(handed)
        if probe is not None:
            measured = probe.trace.calls[probe.index]
            freed = 0 if handed is None else handed.nbytes
            if freed and on_host is None:  # over the budget: a plain recomputation
                measured.action = RECOMPUTE.name
            else:
                host_bytes = 0 if on_host is None else on_host.host_bytes
                measured.host_bytes[self.spec.name] = host_bytes
                measured.freed = self.spec.name, RECOMPUTE.name, freed
        if handed is None or on_host is None:
            return None
        return AwayInput(handed, on_host)


def _handed_over(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that the layer before passed to a call, if it can go.

    That is the first argument with a graph. Several layers read others, such as masks
    and an encoder's output, so to drop them in one layer frees nothing.
    """
    for _, tensor in argument_tensors(args, kwargs):
        if tensor.layout == torch.strided and tensor.grad_fn is not None:
            return tensor if _can_go(tensor) else None
    return None


def _can_go(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its storage and the node that made it has not saved it."""
    if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    if type(tensor) is not torch.Tensor or "result" in saved_names(tensor.grad_fn):
        return False
    return tensor.nbytes == tensor.untyped_storage().nbytes()
