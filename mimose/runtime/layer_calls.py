"""Runs the layers' forwards: each call under its action, measured if the step is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from cachetools import LRUCache
from torch import nn
from torch.nn.utils import parametrize

from mimose.actions.base import Action, Invocation, Probe
from mimose.actions.registry import points_of
from mimose.cost.series import Kind, Series
from mimose.exactness.findings import Findings
from mimose.exactness.layer import Layer
from mimose.exceptions import NotRecomputableError
from mimose.inputs.call_shape import CallShape, argument_tensors, call_shape, fast_key
from mimose.inputs.describe import Mode
from mimose.inputs.families import autocast_state, digest
from mimose.measure.gauges import Gauges
from mimose.measure.trace import Trace
from mimose.model.patch import Patch, hidden, is_traced
from mimose.model.placement import only_device
from mimose.predictors import LeastSquares
from mimose.runtime.step import Step, is_in_backward
from mimose.runtime.unplanned import OUTSIDE, Unplanned
from mimose.torch_private import (
    are_parametrizations_cached,
    is_dual_level_open,
    is_from_forbidden_hooks,
    may_push_saved_hooks,
    top_transform,
)
from mimose.types import MOST_CONTEXTS, Measured, Sizes

_EDITED = "its input is edited in place after it was read"
_FORBIDS = "it forbids hooks of saved tensors, as torch.func.grad does"


class LayerCalls:
    """Runs the layer calls of the running step; otherwise only their own forwards.

    Args:
        root: The model.
        layers: Its layers.
        actions: The actions in use.
        findings: What layers read in the running forward.
        unplanned: Counts calls without a running step.
        action_at: A baseline's choice by a layer call's position; None without one.

    Attributes:
        layers: The argument.
        findings: The argument.
        counts: How often each layer was called in the running window.
        mode: What the model trains now.
        step: The running step; None between steps.
        lacks_gradients: Whether a planned call ran without gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[Layer],
        actions: Sequence[Action],
        findings: Findings,
        unplanned: Unplanned,
        action_at: Callable[[int], str] | None,
    ) -> None:
        self.layers = layers
        self.counts = [0] * len(layers)
        self.step: Step | None = None
        self.lacks_gradients = False
        self.untraced = hidden(LayerPatch.__call__)
        self.findings, self._unplanned = findings, unplanned
        self._action_at = action_at
        self._device = only_device(root)
        self.gauges = Gauges(root)
        self._actions = {action.spec.name: action for action in actions}
        self._points = points_of(actions)
        self._first, self._least = actions[0].spec.name, actions[-1].spec.name
        self._recomputing = {a.spec.name for a in actions if a.spec.recomputes}
        self._flops: dict[tuple[str, int], Series] = {}
        """FLOPs of recomputations with the early stop, by family and number of sizes:
        of those that are not measured."""
        self._waiting: dict[tuple[tuple[str, int], Sizes], list[int]] = {}
        """Numbers of this step's calls whose FLOPs its backward will count."""
        self._plan: tuple[object, int] = None, -1
        """The plan that the layers have, and the findings' version at that time."""
        self._trace: Trace | None = None
        self._shapes: LRUCache[Hashable, CallShape] = LRUCache(MOST_CONTEXTS)
        """Shapes of the last measured calls."""
        self.mode = Mode("", ())
        self._known_modes: set[str] = set()

    # ------------------------------------------------------------------ the model

    def set_mode(self, mode: Mode) -> None:
        """Set what is trained now. In a new mode, layers may change other tensors."""
        self.findings.use_families(mode.layer_keys)
        if mode.key not in self._known_modes:
            self.forget_changes()
            self._known_modes.add(mode.key)
        self.mode = mode  # last: an interrupt may come before each line

    def renew(self) -> None:
        """Record the layers' content again, because the model's modules changed."""
        for layer in self.layers:
            layer.enter()

    def forget_changes(self) -> None:
        """Forget what the layers change."""
        for layer in self.layers:
            layer.forget()

    # ------------------------------------------------------------------ a forward

    def begin(self, step: Step) -> None:
        """Set the running step, and the actions of each layer's calls."""
        self.step, self._trace = step, step.trace
        self.findings.read.clear()
        self.findings.impure.clear()
        self.lacks_gradients = False
        self._waiting.clear()
        chosen = step.decision.chosen
        plan = [()] * len(self.layers) if chosen is None else chosen.by_layer
        is_measured, version = self._trace is not None, self.findings.version
        if is_measured or plan is not self._plan[0] or version != self._plan[1]:
            for layer, actions in zip(self.layers, plan, strict=True):
                layer.plan(actions, self._first, is_measured)
            self._plan = (None, -1) if is_measured else (plan, version)
        if is_measured:
            self.gauges.begin()
        self.counts[:] = step.forward.counts or [0] * len(self.layers)

    def note_outside(self) -> None:
        """Count a call of a layer in training mode without a running step."""
        if torch.is_grad_enabled() and not is_in_backward():
            self._unplanned.note(OUTSIDE)

    def end(self) -> None:
        """End the running step's forward."""
        self.step = self._trace = None
        self.findings.read.clear()

    def abandon_forward(self) -> None:
        """Free what the failed forward held for recomputations."""
        for _, given in self.findings.read:
            given.release()

    def raise_if_unrepeatable(self) -> None:
        """Check at the end of the forward that its layers may be recomputed.

        Layers that may not are kept from now on.

        Raises:
            NotRecomputableError: A call of this step cannot be recomputed.
        """
        read, impure = self.findings.read, self.findings.impure
        edited = [index for index, given in read if given.are_edited()]
        for index in edited:
            self.findings.keep(index, _EDITED)
        found = {**dict.fromkeys(edited, _EDITED), **impure}
        if found:
            names = {index: self.layers[index].name for index in found}
            raise NotRecomputableError(names, next(iter(found.values())))

    # ------------------------------------------------------------------ one call

    def run(
        self,
        layer: Layer,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call that is measured, or whose action may not be keep.

        Args:
            layer: The layer.
            original: Its own forward.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        step, trace, at = self.step, self._trace, self.counts[layer.index] - 1
        assert step is not None
        planned = layer.actions[at] if at < len(layer.actions) else None
        if not torch.is_grad_enabled():
            self.lacks_gradients = self.lacks_gradients or planned is not None
            return original(*args, **kwargs)
        if trace is not None:
            return self._measure(step, trace, layer, at, planned, args, kwargs)
        name = planned or self._next_action(step)
        call = Invocation(layer, args, kwargs, is_whole=step.decision.is_whole)
        if name != self._first:
            name = self._chosen(name, layer)
            if name == self._first:
                return call.forward()
        if planned is None and name in self._recomputing:
            call = self._counted(step, call)
        return self._act(name, call, None)

    def _next_action(self, step: Step) -> str:
        """Return the action of a call that is in no plan."""
        action_at = None if step.decision.phase == "fallback" else self._action_at
        name = action_at(len(step.actions)) if action_at else self._least
        step.ran_unplanned(name)
        return name

    def _act(self, name: str, call: Invocation, probe: Probe | None) -> Any:
        """Run a call under an action.

        Raises:
            NotRecomputableError: The action's hooks are forbidden within the layer.
        """
        try:
            return self._actions[name].run(call, probe)
        except RuntimeError as error:
            if name == self._first or not is_from_forbidden_hooks(error):
                raise
            layer = call.layer
            layer.keep_alike(_FORBIDS)
            raise NotRecomputableError({layer.index: layer.name}, _FORBIDS) from error

    def _chosen(self, name: str, layer: Layer) -> str:
        """Return the action of a call, when it runs.

        An action that cannot run the layer is not chosen for it again; the safest
        action replaces it.
        """
        if layer.is_kept:
            return self._first
        why = _why_not_again(layer)
        if why is not None:
            layer.keep(why)
            return self._first
        if name not in layer.excluded:
            why = self._actions[name].why_not(layer)
            if why is None:
                return name
            if name == self._least:
                layer.keep(why)
                return self._first
            layer.exclude(name, why)
        return self._chosen(self._least, layer)

    # ------------------------------------------------------------------ measuring

    def _measure(
        self,
        step: Step,
        trace: Trace,
        layer: Layer,
        at: int,
        planned: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = Invocation(layer, args, kwargs)
        inputs = [tensor for _, tensor in argument_tensors(args, kwargs)]
        if top_transform() is not None or not _has_gradients(layer.module, inputs):
            return call.forward()
        name = planned or self._least
        is_free = planned == self._first
        if name != self._first:
            name = self._chosen(name, layer)
        key = fast_key(args, kwargs)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = call_shape(args, kwargs)
        measured = Measured(
            name=f"{layer.name}#{at}",
            layer=layer.index,
            number=at,
            sizes=shape.sizes,
            action=name,
            part=step.forward.part,
        )
        index = trace.enter(measured)
        # Other steps have measured what a call holds that the plan keeps.
        probe = None
        if not is_free:
            gauge = self.gauges.of_call(layer, inputs, measured)
            around = None if self._points is None else self._points.around
            probe = Probe(trace, index, gauge, inputs, around)
        output = self._act(name, call, probe)
        ranks = trace.leave(index, inputs, output)
        alike = self.mode.layer_keys[layer.index], autocast_state(self._device)
        family = _family((*alike, shape.structure), ranks)
        measured.family = self.gauges.own_family(family, measured)
        return output

    # ------------------------------------------------------------------ FLOPs

    def _counted(self, step: Step, call: Invocation) -> Invocation:
        """Count the FLOPs of a recomputation that is not measured.

        They are those of a recomputation that stops after the last needed tensor. At
        sizes at which they are not known, one call of a family is counted for all, and
        runs to its end.
        """
        layer = call.layer
        sizes = call_shape(call.args, call.kwargs).sizes
        name = self.mode.layer_keys[layer.index], len(sizes)
        known = self._flops.get(name, Series(Kind(LeastSquares())))
        if not known.why_unknown(sizes):
            step.count_flops(round(known.predict(sizes)))
            return call
        if (name, sizes) in self._waiting:
            self._waiting[name, sizes][0] += 1
            return call
        n_calls = self._waiting[name, sizes] = [1]
        inputs = [tensor for _, tensor in argument_tensors(call.args, call.kwargs)]
        gauge = self.gauges.of_call(layer, inputs)

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            output, reading = gauge(forward, given)
            n_flops = reading.early_flops
            self._flops[name] = known.with_readings([(sizes, n_flops)])
            step.count_flops(n_calls[0] * n_flops)
            return output

        return call._replace(on_recompute=run, is_whole=True)


class LayerPatch(Patch):
    """Replaces a layer's forward, and follows the running step, if there is one.

    Args:
        layer: The layer.
        calls: Runs the calls that are not simply kept.
        owner: The session.
    """

    def __init__(self, layer: Layer, calls: LayerCalls, owner: object) -> None:
        super().__init__(layer.module, partial(calls.run, layer), owner)
        self._layer, self._calls = layer, calls
        self._index, self._counts = layer.index, calls.counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call; if it is simply kept, only its own forward."""
        layer, calls = self._layer, self._calls
        if is_traced():  # by code that compiles it after attach
            return calls.untraced(self, *args, **kwargs)
        if calls.step is None or self.is_removed:
            if layer.module.training and not self.is_removed:
                calls.note_outside()
            return self.original(*args, **kwargs)
        self._counts[self._index] += 1
        if self._counts[self._index] <= layer.n_straight and torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self._run(self.original, args, kwargs)


@lru_cache(MOST_CONTEXTS)
def _family(*key: Hashable) -> str:
    """Return the name of a call's family; to digest its key takes 30 µs."""
    return digest(key)


def _why_not_again(layer: Layer) -> str | None:
    """Return why a call cannot run again in its backward; None if it can.

    Its context has ended by then, or forbids hooks on saved tensors.
    """
    if top_transform() is not None:
        return "it is called inside a transform of torch.func"
    if not may_push_saved_hooks():
        return "it is called where hooks of saved tensors are forbidden"
    if is_dual_level_open():
        return "it is called inside a level of forward-mode differentiation"
    if are_parametrizations_cached() and any(
        map(parametrize.is_parametrized, layer.module.modules())
    ):
        return "it is called inside parametrize.cached()"
    return None


def _has_gradients(module: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call takes part in the backward; otherwise it is not measured."""
    return any(tensor.requires_grad for tensor in inputs) or any(
        parameter.requires_grad for parameter in module.parameters()
    )
