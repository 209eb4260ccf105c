"""Lengths of batches: generated within published ranges, or from a file.

The Mimose paper (Liao et al., IPDPS 2023, Fig. 3 and the table of tasks) gives the
range of its batches' input sizes and a figure of their distribution. The generators
here have those ranges and shapes. Their lengths are synthetic, which rows state.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

Sizes: TypeAlias = dict[str, int]
SizeTrace: TypeAlias = Callable[[np.random.Generator, int], list[Sizes]]
"""Takes a generator and the number of batches; returns the sizes of each."""

_SPIKE = 0.12
"""The share of SQuAD's batches that are cut to the longest length."""


def long_tail(least: int, most: int, sharpness: float = 5.0) -> SizeTrace:
    """Return lengths with most of them near the least, and a long tail to the most.

    The shape of SWAG, QQP and UN_PC in the paper's Fig. 3.

    Args:
        least: The shortest length.
        most: The longest.
        sharpness: The second parameter of the Beta distribution. The larger it is, the
            nearer lengths are to the least.
    """

    def trace(generator: np.random.Generator, n_batches: int) -> list[Sizes]:
        shares = generator.beta(1.5, sharpness, n_batches)
        lengths = np.rint(least + shares * (most - least))
        return [{"length": int(length)} for length in lengths]

    return trace


def bell_with_spike(least: int, most: int, mode: int) -> SizeTrace:
    """Return lengths in a bell around a mode, and some cut to the most.

    The shape of SQuAD in the paper's Fig. 3.
    """

    def trace(generator: np.random.Generator, n_batches: int) -> list[Sizes]:
        bell = generator.normal(mode, (most - least) / 6, n_batches)
        is_cut = generator.random(n_batches) < _SPIKE
        lengths = np.where(is_cut, most, bell.clip(least, most))
        return [{"length": int(length)} for length in lengths]

    return trace


def pairs(least: int, most: int) -> SizeTrace:
    """Return lengths of sources with a long tail, and similar ones of targets."""
    sources = long_tail(least, most, 3.0)

    def trace(generator: np.random.Generator, n_batches: int) -> list[Sizes]:
        found = []
        for sizes in sources(generator, n_batches):
            source = sizes["length"]
            target = round(source * generator.uniform(0.85, 1.15))
            found.append(
                {"source": source, "target": int(np.clip(target, least, most))}
            )
        return found

    return trace


def from_file(path: Path, names: Sequence[str]) -> list[Sizes]:
    """Read a user's trace: a CSV file with a column for each size.

    Raises:
        ValueError: A column is missing, or a value is not an integer of at least 1.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        if missing:
            msg = f"{path} has columns {reader.fieldnames}, and no {', '.join(missing)}"
            raise ValueError(msg)
        found = [
            _sizes(path, number, line, names) for number, line in enumerate(reader, 2)
        ]
    if not found:
        msg = f"{path} has no line beside its columns' names"
        raise ValueError(msg)
    return found


def _sizes(
    path: Path, number: int, line: Mapping[str, str], names: Sequence[str]
) -> Sizes:
    sizes = {}
    for name in names:
        text = line[name] or ""
        if not text.strip().isdigit() or int(text) < 1:
            msg = f"{path}, line {number}: {name} is {text!r}, not a size of at least 1"
            raise ValueError(msg)
        sizes[name] = int(text)
    return sizes
