"""Many steps as few marks: those of one phase at one place become one.

A mark is the median, with a bar from the lowest to the highest, so that no extreme is
lost however many steps there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimose.report.page.looks import INK, PHASE_COLOURS, PHASE_SYMBOLS, PHASE_WORDS
from mimose.report.page.steps import Steps
from mimose.report.page.svg import Point, Series
from mimose.report.shapes import shape_text

FEW = 400
"""So many steps are drawn one by one."""
_MOST_PLACES = 200
_FEW_RINGS = 40
_OVER_COLOUR = "#D00000"
_PHASES = list(PHASE_COLOURS)


@dataclass(frozen=True, slots=True)
class Group:
    """Steps of a phase that are drawn as one mark."""

    phase: str
    x: float
    positions: NDArray[np.intp]


def groups(
    steps: Steps, xs: NDArray[np.float64], ys: NDArray[np.float64]
) -> list[Group]:
    """Part the steps by phase and place; few steps stay by themselves.

    Args:
        steps: The steps.
        xs: Where each stands, (n_steps,).
        ys: How high, (n_steps,); those that are NaN are left out.
    """
    known = np.flatnonzero(~(np.isnan(ys) | np.isnan(xs)))
    phases = np.array([_PHASES.index(steps.records[i].phase) for i in known], dtype=int)
    if len(known) <= FEW:
        return [
            Group(_PHASES[phase], float(xs[i]), np.array([i], dtype=np.intp))
            for i, phase in zip(known.tolist(), phases.tolist(), strict=True)
        ]
    places = _places(xs[known])
    keys = phases * (places.max() + 1) + places
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    return [
        Group(_PHASES[phases[part[0]]], float(np.median(xs[known[part]])), known[part])
        for part in np.split(order, cuts)
    ]


def _places(xs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Number the places along the axis: every value its own, or even bins."""
    found, number = np.unique(xs, return_inverse=True)
    if len(found) <= _MOST_PLACES:
        return np.asarray(number, dtype=np.intp)
    edges = np.linspace(found[0], found[-1], _MOST_PLACES + 1)[1:-1]
    return np.searchsorted(edges, xs, side="right")


def series(
    steps: Steps,
    parts: Sequence[Group],
    ys: NDArray[np.float64],
    write: Callable[[float], str],
) -> list[Series]:
    """Make a series of marks for each phase.

    Args:
        steps: The steps.
        parts: What `groups` returned.
        ys: How high each step stands, (n_steps,).
        write: Writes a height for people.
    """
    found = []
    for phase in _PHASES:
        own = [part for part in parts if part.phase == phase]
        if own:
            found.append(
                Series(
                    name=PHASE_WORDS[phase],
                    colour=PHASE_COLOURS[phase],
                    symbol=PHASE_SYMBOLS[phase],
                    points=[_point(steps, part, ys, write) for part in own],
                )
            )
    return found


def _point(
    steps: Steps,
    part: Group,
    ys: NDArray[np.float64],
    write: Callable[[float], str],
) -> Point:
    if len(part.positions) == 1:
        only = int(part.positions[0])
        return Point(part.x, float(ys[only]), text=steps.hover(only))
    own = ys[part.positions]
    low, middle, high = float(own.min()), float(np.median(own)), float(own.max())
    lines = [*_told(steps, part), f"median {write(middle)}"]
    lines.append(f"from {write(low)} to {write(high)}")
    return Point(part.x, middle, low, high, "\n".join(lines))


def _told(steps: Steps, part: Group) -> Iterator[str]:
    """Tell which steps a mark stands for."""
    first, last = int(part.positions[0]), int(part.positions[-1])
    numbers = f"{steps.records[first].step:,} to {steps.records[last].step:,}"
    of_runs = "" if steps.n_runs == 1 else ", of several runs"
    yield f"{len(part.positions):,} steps ({part.phase}), {numbers}{of_runs}"
    shapes = {steps.shapes[i] for i in part.positions.tolist()}
    yield (
        f"{len(shapes)} shapes" if len(shapes) > 1 else shape_text(next(iter(shapes)))
    )


def rings(
    steps: Steps, xs: NDArray[np.float64], ys: NDArray[np.float64]
) -> list[Series]:
    """Ring the steps over the budget, and those that were run again; as `ringed`."""
    return [
        *ringed(steps, "over the budget", _OVER_COLOUR, steps.over, xs, ys),
        *ringed(steps, "run again", INK, steps.run_again, xs, ys),
    ]


def ringed(
    steps: Steps,
    name: str,
    colour: str,
    at: Sequence[int],
    xs: NDArray[np.float64],
    ys: NDArray[np.float64],
) -> list[Series]:
    """Ring some steps, each by itself.

    Args:
        steps: The steps.
        name: What they have in common.
        colour: Of the rings.
        at: Which; those without a height are left out.
        xs: Where each step stands, (n_steps,).
        ys: How high, (n_steps,).
    """
    points = [
        Point(float(xs[i]), float(ys[i]), text=f"{name}\n{steps.hover(i)}")
        for i in at
        if not np.isnan(ys[i])
    ]
    if not points:
        return []
    size = 7.0 if len(points) <= _FEW_RINGS else 4.0
    return [
        Series(
            name=name,
            colour=colour,
            points=points,
            symbol="ring",
            size=size,
            opacity=1.0,
        )
    ]


def told(parts: Sequence[Group]) -> str:
    """Say what a mark stands for, as a sentence.

    Args:
        parts: What `groups` returned.
    """
    if all(len(part.positions) == 1 for part in parts):
        return "A dot is a step."
    return (
        "A dot is the median of the steps of one phase at that place, its bar goes "
        "from their lowest to their highest."
    )
