"""Options of command lines, and what is said of those that cannot be read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from mimose import usage


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (usage.at_least_one, "1", 1),
        (usage.seed, "0", 0),
        (usage.seed, "4294967295", 2**32 - 1),
        (usage.positive, "0.5", 0.5),
        (usage.names, " a, b,", ["a", "b"]),
        (usage.shares, "1,0.25", (1.0, 0.25)),
    ],
)
def test_what_can_be_read(read: Callable[[str], Any], text: str, value: Any) -> None:
    """The extremes are allowed."""
    assert value == read(text)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (usage.at_least_one, "0"),
        (usage.seed, "4294967296"),
        (usage.positive, "inf"),
        (usage.positive, "soon"),
        (usage.names, " ,"),
        (usage.shares, "0.5,"),
        (usage.shares, "50%"),
    ],
)
def test_what_cannot_be_read(read: Callable[[str], Any], text: str) -> None:
    """The message says what it must be, and repeats what was given."""
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        read(text)

    assert str(raised.value).startswith("must be ")
    assert f"got {text!r}" in str(raised.value)


def test_needed_packages() -> None:
    """Those that are there are no word worth; those that are not come in one line."""
    usage.need("bench", "json", "csv")
    with pytest.raises(
        usage.UsageError,
        match=r"^not_there, nor_here are missing: pip install 'mimose\[bench\]'$",
    ):
        usage.need("bench", "json", "not_there", "nor_here")
