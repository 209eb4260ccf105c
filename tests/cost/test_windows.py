"""What is expected of the windows to come."""

import pytest

from mimose.cost.windows import Windows
from mimose.types import StepInput


def _part(name, *sizes, has_gradients=False):
    return StepInput(name, sizes, has_gradients, f"structure {name}")


def _kinds(windows, *names):
    """Return the contexts expected behind the first forward, for each name."""
    return [
        [part.context for part in windows.ending([_part(name, 3)]).parts]
        for name in names
    ]


def test_what_followed_last_time_is_expected():
    """Forwards and backwards to come are those of the last such window."""
    windows = Windows()
    windows.absorb([_part("a", 3), _part("b", 4)], 2)
    ending = windows.ending([_part("a", 7)])
    assert (["b"], 2) == ([p.context for p in ending.parts], ending.n_backwards)
    assert () == windows.ending([_part("a", 7), _part("b", 8)]).parts


@pytest.mark.parametrize("n_before", [1, 5])
def test_windows_that_take_turns(n_before):
    """Which one comes is told by those before it."""
    windows = Windows()
    kinds = ([2] * n_before + [1]) * 6
    wrong = []
    for number, n_parts in enumerate(kinds):
        (told,) = _kinds(windows, "a")
        if number and len(told) != n_parts - 1:
            wrong.append(number)
        windows.absorb([_part("a", 3)] * n_parts)
    assert len(wrong) <= 3 + n_before
    assert not [number for number in wrong if number >= len(kinds) // 2]


def test_sizes_to_come_follow_from_the_first():
    """A rule tells them: equal, constant, or another."""
    windows = Windows()
    for length in (8, 12, 20, 16, 40):
        windows.absorb([_part("a", 4, length), _part("b", 4, length, 2 * length)])
    first = _part("a", 4, 30)
    (second,), is_sure = windows.to_come([first], windows.ending([first]))
    assert ((4, 30, 60), True) == (second.sizes, is_sure)


def test_sizes_without_a_rule_are_the_largest():
    """What may come is no larger than what came, once enough has come."""
    windows = Windows()
    others = [31, 5, 17, 44, 9, 12, 40, 33, 21, 8, 27, 14, 38, 19, 6, 11, 24, 30]
    for number, other in enumerate(others):
        windows.absorb([_part("a", 8 + 37 * number % 101), _part("b", other)])
    first = _part("a", 16)
    ending = windows.ending([first])
    (second,), is_sure = windows.to_come([first], ending)
    assert ((44,), False) == (second.sizes, is_sure)
    (median,), _ = windows.to_come([first], ending, share=0.5)
    assert 19 <= median.sizes[0] <= 21


def test_what_is_remembered_is_bounded():
    """Kinds and sizes without end take no memory without end."""
    windows = Windows()
    for number in range(3000):
        windows.absorb([_part(f"{number % 700}", number), _part("b", number)])
    state = windows.state_dict()
    assert len(state["endings"]) <= 2048
    assert len(state["rows"]) <= 64
    assert max(len(rows) for _, rows in state["rows"]) <= 32
    first = _part("2", 4)
    windows.to_come([first], windows.ending([first]))
