"""Keeps a call's activations, as without a plan."""

from __future__ import annotations

from typing import Any

from mimose.actions.base import Invocation, Probe
from mimose.exactness.call_inputs import CallInputs, is_opaque
from mimose.exactness.layer import Layer
from mimose.exactness.side_effects import OBJECT_CHANGES, FirstCall
from mimose.planners.actions import KEEP
from mimose.torch_private import pytree, top_saved_hooks


class Keep:
    """Holds everything that autograd saves, until the backward."""

    spec = KEEP

    def why_not(self, layer: Layer) -> str | None:
        """Return None, because every layer can be kept."""
        del layer
        return None

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward; a first call shows what it changes."""
        layer = call.layer
        if layer.is_known or layer.is_kept:
            return self._run(call, probe)
        first, given = FirstCall(layer.module), CallInputs()
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            if is_opaque(leaf):
                given.add(leaf)
        output = self._run(call, probe)
        why = layer.learn(first)
        if given.are_edited():
            why = OBJECT_CHANGES
        if why:
            layer.keep(why)
        return output

    def _run(self, call: Invocation, probe: Probe | None) -> Any:
        if probe is None:
            return call.forward()
        return probe.trace.kept(probe.index, call.forward, probe.inputs, probe.gauge)


class KeepLess(Keep):
    """Holds only a part of that, or holds it in another form or place."""

    def why_not(self, layer: Layer) -> str | None:
        """Return why the tensors that a call saves cannot be listed."""
        if layer.is_compiled:
            return (
                "what compiled code saves cannot be listed, so it is kept or "
                "recomputed as a whole"
            )
        if top_saved_hooks(True) is not None:
            return "hooks of other code hold what it saves"
        return None
