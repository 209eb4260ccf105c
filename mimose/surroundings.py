"""What the recomputations have to find as the forward left it: weights and modes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from mimose.exceptions import ChangedWeightsError

_TRAINING = operator.attrgetter("training")


class Look(NamedTuple):
    """A model's surroundings at one moment."""

    weights: list[nn.Parameter | None]
    versions: list[int]
    modes: tuple[bool, ...]


class Surroundings:
    """Looks at a model's weights and modes where a forward ends and a backward begins.

    A weight changed in between would be recomputed with, silently, and give other
    gradients than the bare model's. Optimizers that step within the backward do so
    layer by layer, each behind its recomputation.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._slots = tuple(
            (module._parameters, name)
            for module in self._modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        )

    def look(self) -> Look:
        """Return what is there now."""
        weights = [parameters.get(name) for parameters, name in self._slots]
        versions = [weight._version for weight in weights if weight is not None]
        return Look(weights, versions, tuple(map(_TRAINING, self._modules)))

    def changed_modes(self, before: Look) -> Mapping[nn.Module, bool] | None:
        """Return the modes that were another then; None if all are the same.

        Args:
            before: What was there when the forward had run.

        Raises:
            ChangedWeightsError: The weights are not those of the forward any more.
        """
        now = self.look()
        same = all(map(operator.is_, now.weights, before.weights))
        if not same or now.versions != before.versions:
            msg = (
                "weights were replaced or changed in place after the forward and "
                "before its backward (torch.func.functional_call, or an optimizer step "
                "in between?), and layers recomputed with them would give other "
                "gradients: run the backward before, or detach the session"
            )
            raise ChangedWeightsError(msg)
        if now.modes == before.modes:
            return None
        pairs = zip(self._modules, before.modes, strict=True)
        return {module: mode for module, mode in pairs if module.training != mode}


@contextlib.contextmanager
def in_modes(unit: nn.Module, modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Put the modules of a unit into other modes for a while."""
    now = {m: m.training for m in unit.modules() if m in modes}
    for module in now:
        module.training = modes[module]
    try:
        yield
    finally:
        for module, mode in now.items():
            module.training = mode
