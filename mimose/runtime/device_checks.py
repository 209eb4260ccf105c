"""Settings under which steps cannot be planned, or exceed every plan."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.torch_private import ConvNd, parameters_of

_log = logging.getLogger(__name__)

_GRAPHED = "make_graphed_callables."
"""Part of the qualified name of what `torch.cuda.make_graphed_callables` puts in place
of a ``forward``; torch has no public way to tell."""


class DeviceChecks:
    """Looks at the settings when a session begins, and before each step.

    Which checks a device needs is decided once: a step on a CPU runs none but that of
    the place of one parameter.

    Args:
        model: The model.
        device: Where it is.
        also: Looks at something else before each step; None for nothing.

    Raises:
        MimoseError: A forward in it was replaced by a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        also: Callable[[], None] | None = None,
    ) -> None:
        _refuse_graphed(model)
        self._also = also
        self._device = device
        self._place = next(
            (
                (parameters_of(module), name)
                for module in model.modules()
                for name, parameter in parameters_of(module).items()
                if parameter is not None and parameter.device == device
            ),
            None,
        )
        self._is_capturing = _capture_check(device)
        self._watches_benchmark = device.type == "cuda" and any(
            isinstance(module, ConvNd) for module in model.modules()
        )
        self._warn_of_benchmark()

    def before_step(self) -> None:
        """Make sure that a step can be planned; it costs about a microsecond.

        Raises:
            MimoseError: A graph is being captured, the model was moved, or what is
                looked at beside says so.
        """
        if self._also is not None:
            self._also()
        if self._place is not None:
            there, name = self._place
            # The tables of scripted modules have no `get`.
            parameter = there[name] if name in there else None  # noqa: SIM401
            if parameter is not None and parameter.device != self._device:
                self._refuse_moved(parameter.device)
        if self._is_capturing is not None and self._is_capturing():
            msg = (
                f"a graph is being captured on {self._device}, and a planned step "
                f"cannot be part of one: it reads memory, decides anew at each shape "
                f"and calls back from autograd. Call session.detach() before capturing "
                f"the model, or train without graphs"
            )
            raise MimoseError(msg)
        if self._watches_benchmark:
            self._warn_of_benchmark()

    def _refuse_moved(self, to: torch.device) -> None:
        msg = (
            f"the model was moved from {self._device} to {to} after attach, and the "
            f"budget is about {self._device}: detach, and attach again where it is"
        )
        raise MimoseError(msg)

    def _warn_of_benchmark(self) -> None:
        """Warn, once, that cuDNN tries algorithms with workspaces of any size."""
        if not self._watches_benchmark or not torch.backends.cudnn.benchmark:
            return
        self._watches_benchmark = False
        _log.warning(
            "mimose: torch.backends.cudnn.benchmark is on: at every new input shape "
            "cuDNN tries convolution algorithms whose workspaces may take hundreds of "
            "MiB and belong to no plan, so steps of new shapes can exceed the budget. "
            "Switch it off (torch.backends.cudnn.benchmark = False), or leave that "
            "much more free between the budget and the device's memory."
        )


def _capture_check(device: torch.device) -> Callable[[], bool] | None:
    """Return what tells whether a graph is being captured, where the device can."""
    if device.type == "cpu":
        return None
    check: Callable[[], bool] | None
    check = getattr(
        torch.get_device_module(device), "is_current_stream_capturing", None
    )
    try:
        if check is not None:
            check()
    except RuntimeError:  # named, but not there in this build of torch
        return None
    return check


def _refuse_graphed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if _GRAPHED in getattr(forward, "__qualname__", ""):
            msg = (
                f"the forward of {name or 'the model'} ({type(module).__name__}) is a "
                f"CUDA graph (torch.cuda.make_graphed_callables): it holds all of its "
                f"memory for good, in backward too, so there is nothing to plan. "
                f"Attach to a model without graphs"
            )
            raise MimoseError(msg)
