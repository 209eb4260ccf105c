"""How a strategy is shown: its colour, and whether it is lossy."""

from __future__ import annotations

from mimose.bench.grid.menu import BETWEEN
from mimose.bench.grid.registry import STRATEGIES

# Okabe and Ito's palette for our own, paler colours for the peers.
_EVERYWHERE = {
    "lean": "#E7BA52",
    "pool": "#F768A1",
    "pool4": "#AE017E",
    "quantize": "#66C2A4",
    "quantize4": "#006D2C",
    "offload": "#8DA0CB",
    "offload_input": "#4A1486",
}
COLOURS = {
    **{action: _EVERYWHERE[action] for action in BETWEEN},
    "hf-full": "#8C564B",
    "hf-every-2": "#C49C94",
    "hf-offload": "#BCBD22",
    "selective": "#7F7F7F",
    "selective-attention": "#C7C7C7",
    "torch-remat": "#8C6D31",
    "compile-budget": "#9467BD",
    "save-on-cpu": "#17BECF",
    "trl-offload": "#AEC7E8",
    "autosac": "#2CA02C",
    "rockmate": "#FF9896",
    "none": "#555555",
    "full": "#E69F00",
    "every-2": "#CC79A7",
    "static": "#56B4E9",
    "static-menu": "#393B79",
    "mimose-paper": "#D55E00",
    "oracle": "#009E73",
    "oracle-menu": "#637939",
    "eviction": "#F0E442",
    "oracle-all": "#31A354",
    "mimose-menu": "#6B6ECF",
    "mimose-all": "#252525",
    "mimose": "#0072B2",  # drawn over the others
}
"""By strategy."""


def is_lossy(name: str) -> bool:
    """Whether a strategy's gradients are others than plain training's."""
    return name in STRATEGIES and not STRATEGIES[name].is_exact


def marked(name: str) -> str:
    """Return a strategy's name, and a word where it is lossy."""
    return f"{name} (lossy)" if is_lossy(name) else name
