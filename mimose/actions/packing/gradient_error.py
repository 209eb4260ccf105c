"""By how much a lossy action changes a layer's gradient: measured, not assumed.

Note: [Gradient error]
Right after a call has run its gradient is taken for one drawn gradient of what it
returned, normally distributed: once from what autograd has saved, once more when that
was packed. The error is the norm of the difference over the norm of the gradient, of
all weights of the layer together or of what it was handed, whichever is larger. It is
taken in a layer's first call under an action and in one of many afterwards, where there
is a bound. What is drawn comes from a generator of its own, and nothing that is a
gradient is written to. The layer's backward runs twice more for that, and with it the
hooks of tensors inside. Who cannot bear that, as far as it shows, is not measured:
`unmeasurable`, `unrepeatable`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from mimose.actions.packing.base import Codec, Packed, SavedStorage
from mimose.actions.replay.unit_graph import Ran
from mimose.exactness.autocast import in_autocast
from mimose.torch_private import (
    has_backward_hooks,
    has_global_backward_hooks,
    has_gradient_hooks,
)

Gradients = Sequence[torch.Tensor | None]


class Trial:
    """One measurement: before a call is packed, and behind it.

    Args:
        ran: The call, nothing packed yet.
    """

    def __init__(self, ran: Ran) -> None:
        self._outputs = [t for t in ran.outputs if t.is_floating_point()]
        self._inputs = [t for t in ran.inputs if t.grad_fn is not None]
        self._weights = [p for p in ran.module.parameters() if p.requires_grad]
        device = ran.outputs[0].device
        kinds = {device.type, "cpu"}
        self._kinds = tuple(sorted(kinds))
        generator = torch.Generator().manual_seed(_SEED)
        self._drawn = [
            torch.randn(t.shape, generator=generator).to(device, t.dtype)
            for t in self._outputs
        ]
        self._exact = self._gradients()

    def error(self) -> float:
        """Return the error, now that the call is packed; infinite for no number."""
        exact, packed = self._exact, self._gradients()
        n = len(self._inputs)
        inputs = _relative_error(exact[:n], packed[:n])
        found = max(inputs, _relative_error(exact[n:], packed[n:]))
        return math.inf if math.isnan(found) else found

    def _gradients(self) -> Gradients:
        with in_autocast(self._kinds, ()):
            return torch.autograd.grad(
                self._outputs,
                [*self._inputs, *self._weights],
                self._drawn,
                retain_graph=True,
                allow_unused=True,
            )


_SEED = 5


def _relative_error(exact: Gradients, other: Gradients) -> float:
    """Return the norm of the difference over the norm; 0 where nothing is there."""
    off, whole = 0.0, 0.0
    for one, two in zip(exact, other, strict=True):
        if one is not None and two is not None:
            off = math.hypot(off, _norm(two - one))
            whole = math.hypot(whole, _norm(one))
    if not whole:
        return 0.0 if not off else math.inf
    return off / whole


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def unmeasurable(module: nn.Module, n_calls: int) -> str:
    """Return why a layer's gradient cannot be taken by itself; "" if it can.

    Args:
        module: The layer.
        n_calls: How often it was called in the running forward, this call included.
    """
    if any(map(has_gradient_hooks, module.parameters())):
        return "hooks on its weights would be called for gradients that are none"
    if any(map(has_backward_hooks, module.modules())):
        return "its backward hooks would be called for gradients that are none"
    if has_global_backward_hooks():
        return "hooks on all modules would be called for gradients that are none"
    if n_calls > 1:
        return "its gradient goes on to its earlier calls"
    return ""


def unrepeatable(ran: Ran) -> str:
    """Return why a call's gradient cannot be taken an extra time; "" if it can.

    Args:
        ran: The call.
    """
    if any(isinstance(node, BackwardCFunction) for node in ran.nodes.nodes):
        return "an autograd function of its own may not run backward more than once"
    if any(tensor.retains_grad for tensor in (*ran.inputs, *ran.outputs)):
        return "a tensor keeps its gradient, which would be added to"
    return ""


class Beside:
    """A packed storage, with what was there beside it until that was measured.

    Args:
        packed: The storage.
        whole: What was there.
    """

    def __init__(self, packed: Packed, whole: torch.Tensor) -> None:
        self.packed = packed
        self.device_bytes = packed.device_bytes
        self.host_bytes = packed.host_bytes
        self._whole: torch.Tensor | None = whole
        self._is_exact = False

    def settle(self, *, is_exact: bool) -> None:
        """Give what was there from now on, or let it go."""
        self._is_exact = is_exact
        if not is_exact:
            self._whole = None

    def unpack(self) -> torch.Tensor:
        """Return what was packed, or what was there."""
        if self._is_exact and self._whole is not None:
            return self._whole
        return self.packed.unpack()


class BesideCodec:
    """Packs as another codec does, and holds what was there.

    Args:
        codec: The other.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.is_exact = codec.is_exact
        self._packed: list[Beside] = []

    def takes(self, saved: SavedStorage) -> bool:
        """Whether the other takes a storage."""
        return self._codec.takes(saved)

    def pack(self, saved: SavedStorage) -> Beside | None:
        """Pack a storage."""
        packed = self._codec.pack(saved)
        if packed is None:
            return None
        self._packed.append(Beside(packed, saved.whole))
        return self._packed[-1]

    def settle(self, *, is_exact: bool) -> None:
        """Give what was there from now on, or let it go."""
        for packed in self._packed:
            packed.settle(is_exact=is_exact)
        self._packed.clear()
