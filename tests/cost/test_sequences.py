"""Sequences of events that differ from step to step."""

import pytest

from mimose.cost.patterns import Pattern
from mimose.cost.sequences import CallCounts, Event, merged
from mimose.cost.side_tensors import known_sides
from mimose.planners.actions import EXACT_MENU

KEEP, RECOMPUTE = EXACT_MENU.names


def _events(text, family="f"):
    """Turn ``"a0 b0 a1"`` into events of the units a and b."""
    return tuple(
        Event(f"{word[0]}#{word[1:]}", ord(word[0]) - ord("a"), int(word[1:]), family)
        for word in text.split()
    )


def _text(events):
    return " ".join(event.name.replace("#", "") for event in events)


@pytest.mark.parametrize(
    ("known", "ran", "expected"),
    [
        ("a0 b0 c0", "a0 c0", "a0 b0 c0"),
        ("a0 c0", "a0 b0 c0", "a0 b0 c0"),
        ("b0 d0", "a0 c0", "a0 b0 c0 d0"),
        ("a0 b0 a1 b1 c0", "a0 b0 c0", "a0 b0 a1 b1 c0"),
        ("a0 b0", "b0 a0", None),
    ],
)
def test_one_sequence_holds_both(known, ran, expected):
    """Each stays in its order, whatever the other leaves out; else there is none."""
    found = merged(_events(known), _events(ran))
    assert expected == (None if found is None else _text(found))


@pytest.mark.parametrize(
    ("counts", "foretold"),
    [
        ({1: 1, 2: 2}, {1: 1, 2: 2, 5: 5, 9: 9}),
        ({8: 3, 16: 4, 24: 5, 40: 7}, {32: 6, 8: 3, 48: 8}),
        ({8: 3, 16: 4, 24: 5}, {8: 5, 32: 5}),
        ({8: 3, 16: 4, 24: 5, 40: 3}, {8: 5, 40: 5}),
    ],
)
def test_calls_follow_from_sizes_where_that_is_settled(counts, foretold):
    """A column of the sizes, or a rule of enough steps; else the most calls seen."""
    calls = CallCounts([(7, n) for n in counts], [(1, n) for n in counts.values()])
    assert foretold == {size: calls((7, size))[1] for size in foretold}
    assert {1} == {calls((7, size))[0] for size in foretold}


def _pattern(text, calls):
    return Pattern(_events(text), calls=calls)


def test_more_calls_than_foretold_refute_the_rule():
    """Then the most calls seen are planned for."""
    pattern = _pattern("a0 a1 a2", (3,))
    for n in (1, 2, 3):
        own = (*(((9,),) * n), *(((),) * (3 - n)))
        pattern = pattern.taken_in((n,), own, (n,))
    assert 2 == len(pattern.expected((2,)).events)
    assert 3 == len(pattern.missing((1,), (3,)).expected((2,)).events)


def _sides(pattern, known, ran, measured):
    """Return the groups of readers known then, and the bytes told of each."""
    known = {event.place for event in _events(known)}
    pattern, told = known_sides(pattern, known, _events(ran), measured)

    def text(group):
        return " ".join(chr(ord("a") + unit) for unit, _ in group)

    return [text(g) for g in pattern.sides], {text(g): n for g, n in told.items()}


def _with_sides(text, calls, *groups):
    pattern = _pattern(text, calls)
    return pattern.told(sides=tuple(tuple(e.place for e in _events(g)) for g in groups))


def test_a_side_tensor_is_known_by_the_readers_that_ran():
    """A mask that all read is the same one where some are left out."""
    pattern = _with_sides("a0 b0 c0", (1, 1, 1), "a0 b0 c0", "a0 b0")
    every = "a0 b0 c0"
    assert {"a b c": 7, "a b": 0} == _sides(pattern, every, every, {(0, 1, 2): 7})[1]
    assert {"a b c": 7, "a b": 0} == _sides(pattern, every, "a0 c0", {(0, 1): 7})[1]
    assert {} == _sides(pattern, every, "a0 b0", {(0, 1): 7})[1]  # either of the two
