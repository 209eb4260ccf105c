"""Holds on the host what a call saves, or the input of its recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mimose.actions.base import Invocation, Probe
from mimose.actions.hooks import SavedTensorAction
from mimose.actions.host import AwayInput, Host, HostCall
from mimose.actions.recompute import Recompute
from mimose.inputs.describe import argument_tensors
from mimose.planners.actions import OFFLOAD, OFFLOAD_INPUT, RECOMPUTE
from mimose.tensors import is_plain
from mimose.torch_private import saved_names


class OffloadInput(Recompute):
    """Recomputes a call from an input that is held on the host until then.

    The copy to the host starts when the call begins, and runs beside its forward. If
    the operator that made the input has saved it, it stays, because moving it would
    free nothing.

    Args:
        host: Holds the input; None outside a session.
    """

    spec = OFFLOAD_INPUT

    def __init__(self, host: Host | None = None) -> None:
        self._host = host

    def anew(self, host: Host | None) -> OffloadInput:
        """Return the same action for another session."""
        return OffloadInput(host)

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward, and copy its input to the host."""
        assert self._host is not None
        output = super().run(call, probe)
        self._host.settle()
        return output

    def _send_away(self, call: Invocation, probe: Probe | None) -> AwayInput | None:
        assert self._host is not None
        handed = _handed_over(call.args, call.kwargs)
        on_host, freed = None, 0
        if handed is not None and _can_go(handed):
            on_host = HostCall(self._host).pack(handed)
            freed = handed.nbytes
        if probe is not None:
            measured = probe.trace.calls[probe.index]
            if freed and on_host is None:  # over the budget: a plain recomputation
                measured.keep(RECOMPUTE.name)
            else:
                host_bytes = 0 if on_host is None else on_host.host_bytes
                measured.set_host(self.spec.name, host_bytes)
                measured.set_freed(self.spec.name, RECOMPUTE.name, freed)
        if handed is None or on_host is None:
            return None
        return AwayInput(handed, on_host)


def _handed_over(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that the layer before passed to a call; None if there is none.

    That is the first argument with a graph. Several layers read others, such as masks
    and an encoder's output, so to drop them in one layer frees nothing.
    """
    for _, tensor in argument_tensors(args, kwargs):
        if tensor.layout == torch.strided and tensor.grad_fn is not None:
            return tensor
    return None


def _can_go(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its storage and the node that made it has not saved it."""
    if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    if type(tensor) is not torch.Tensor or "result" in saved_names(tensor.grad_fn):
        return False
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _to_host(host: Host | None) -> Callable[[], HostCall]:
    def make() -> HostCall:
        assert host is not None
        return HostCall(host)

    return make


OFFLOADS = SavedTensorAction(OFFLOAD, _to_host), OffloadInput()
"""The action for what a call saves, and the one for its input."""
