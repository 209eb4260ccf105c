"""Which action layers run under, as bars: a picture that grids and proofs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mimose.report.page.looks import ACTION_COLOURS, ACTION_WORDS, OTHER_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MORE_WORDS = {
    "lean": "lean: what some of its operators rebuild is let go",
    "pool4": "pool4: its activations are held in a much smaller form",
    "quantize4": "quantize4: its activations are held in half as many bits",
    "offload_input": "offload_input: recomputed, and its input waits on the host",
}
_MORE_COLOURS = {
    "lean": "#C6DBEF",
    "pool4": "#A65628",
    "quantize4": "#7B3294",
    "offload_input": "#00563F",
}
COLOURS: Mapping[str, str] = {**_MORE_COLOURS, **ACTION_COLOURS}
"""By action."""
WORDS: Mapping[str, str] = {**_MORE_WORDS, **ACTION_WORDS}
"""By action: what it does."""


def colour_of(action: str) -> str:
    """Return an action's colour; that of all others for one that is not known."""
    return COLOURS.get(action, OTHER_COLOUR)


def words_of(action: str) -> str:
    """Say what an action does; its name alone for one that is not known."""
    return WORDS.get(action, action)


def draw_shares(
    axes: Axes,
    places: Sequence[str],
    shares: Sequence[Mapping[str, float]],
    order: Sequence[str],
) -> None:
    """Draw a bar for each place, of parts that add up to 100%.

    Args:
        axes: Where to draw.
        places: Words below the bars.
        shares: For each place, by action, what share of the layers' calls has it.
        order: Of the actions, from the lowest part of a bar upwards.
    """
    base = [0.0] * len(places)
    for action in order:
        heights = [100.0 * each.get(action, 0.0) for each in shares]
        if any(heights):
            axes.bar(
                range(len(places)),
                heights,
                0.85,
                bottom=base,
                color=colour_of(action),
                label=action,
                edgecolor="white",
                linewidth=0.4,
            )
            base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_xticks(range(len(places)), list(places))
    axes.set_ylim(0, 100)
