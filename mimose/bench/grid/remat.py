"""Meta's torch_remat: a layer is replayed in backward, but for regions that are saved.

Regions are marked by hand in the code of a model. Here that is done from outside: every
linear layer and every attention is a region whose saved tensors stay, and the rest of
the layer (norms, activations, dropout, sums) is replayed. It restores no random state
by itself, so it is given what does.

Source: https://github.com/meta-pytorch/remat (``pip install torch_remat``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mimose.bench.grid.strategies import Applied, Setup
from mimose.tensors import tensors_in
from mimose.torch_private import pytree
from mimose.watch.patch import Patch
from mimose.watch.units import find_units

_LINEAR = ("Linear", "Conv1D")
"""Classes of linear layers, transformers' own among them."""


def why_no_remat(kind: str) -> str:
    """Return why it cannot run; nothing if it can."""
    del kind
    if importlib.util.find_spec("torch_remat") is None:
        return "torch_remat is not installed"
    return ""


def torch_remat(setup: Setup) -> Applied:
    """Checkpoint every layer, its linear layers and attention saved."""
    patches: list[Patch] = []
    for name, layer in find_units(setup.model, setup.units):
        patches += [_Region(module, path) for path, module in saved_regions(layer)]
        patches.append(_Layer(layer, name, setup.device))
    return _Applied(patches)


def saved_regions(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a layer's attentions, and the linear layers outside of these, by path."""
    attentions = [path for path, module in layer.named_modules() if _attends(module)]
    for path, module in layer.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in attentions)
        is_linear = type(module).__name__ in _LINEAR
        if path in attentions or (is_linear and not is_inside):
            yield path, module


def _attends(module: nn.Module) -> bool:
    """Whether a module is an attention with no other inside: without norm and sum."""
    return "Attention" in type(module).__name__ and not any(
        "Attention" in type(child).__name__
        for child in module.modules()
        if child is not module
    )


def _library() -> Any:
    return importlib.import_module("torch_remat")


class _Applied(Applied):
    """Patched layers and regions."""

    def __init__(self, patches: list[Patch]) -> None:
        self._patches = patches

    def close(self) -> None:
        """Take the patches off, the last one first."""
        while self._patches:
            self._patches.pop().remove()


class _Region(Patch):
    """A module whose saved tensors stay, and which is not run again."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        remat = _library()
        self._region = remat.region(self.original, name, recompute=False)
        self._needed = remat.recompute_needs_tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what is around it reads its result when it is replayed."""
        output = self._region(*args, **kwargs)
        self._needed(*tensors_in(output))
        return output


class _Layer(Patch):
    """A layer that is replayed in backward."""

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        super().__init__(module)
        self._replayed = _library().checkpoint(
            region_name=name, recompute_state_hooks=(_RandomState(device),)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; evaluation is left alone.

        What is replayed may return tensors only: what else a layer returns goes past.
        """
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        others: list[Any] = []

        def tensors(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            leaves, tree = pytree.tree_flatten(self.original(*args, **kwargs))
            is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
            rest = [
                None if yes else leaf
                for leaf, yes in zip(leaves, is_tensor, strict=True)
            ]
            others[:] = rest, is_tensor, tree
            return tuple(
                leaf for leaf, yes in zip(leaves, is_tensor, strict=True) if yes
            )

        found = iter(self._replayed(tensors)(*args, **kwargs))
        rest, is_tensor, tree = others
        leaves = [
            next(found) if yes else leaf
            for leaf, yes in zip(rest, is_tensor, strict=True)
        ]
        return pytree.tree_unflatten(leaves, tree)


class _RandomState:
    """Takes and restores a device's random state, as torch_remat asks for."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu":
            self.snapshot, self.restore = torch.get_rng_state, torch.set_rng_state
        else:
            module = torch.get_device_module(device)
            self.snapshot = functools.partial(module.get_rng_state, device)
            self.restore = functools.partial(module.set_rng_state, device=device)
