"""Work that pauses by itself, in threads that asked for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import mimose.planners
import mimose.predictors
from mimose.pauses import give_way, giving_way
from mimose.planners.pauses import give_way as give_way_of_planners


def test_pauses_of_planners_and_predictors_alike() -> None:
    """One function is called by both, and by nobody once it is over."""
    called: list[str] = []

    with giving_way(lambda: called.append("pause")):
        give_way()
        give_way_of_planners()
    give_way()
    give_way_of_planners()

    assert ["pause", "pause"] == called


def test_other_threads_do_not_pause() -> None:
    """A thread that asked for nothing runs on."""
    called: list[str] = []

    with giving_way(lambda: called.append("pause")):
        other = threading.Thread(target=give_way)
        other.start()
        other.join()

    assert [] == called


def test_what_was_asked_for_before_comes_back() -> None:
    """An error inside leaves the outer function asked for."""
    called: list[str] = []

    with giving_way(lambda: called.append("outer")):
        with pytest.raises(ZeroDivisionError), giving_way(lambda: None):
            raise ZeroDivisionError
        give_way()

    assert ["outer"] == called


def test_both_copies_are_alike() -> None:
    """Planners and predictors know nothing of each other, and have the same file."""
    ours, theirs = (
        Path(package.__file__).with_name("pauses.py").read_text(encoding="utf-8")
        for package in (mimose.planners, mimose.predictors)
    )

    assert theirs == ours.replace("The predictors have", "The planners have")
