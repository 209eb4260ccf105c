"""The ladder of batches whose memory is measured."""

import math

import pytest

from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.survey import Begun, survey

_FIXED, _EACH = 1000, 100


class _Child:
    """Answers as a model would that takes a hundred bytes a sample."""

    def __init__(self, runs_out_at=math.inf):
        self.batches = []
        self._runs_out_at = runs_out_at

    def ask(self, message):
        command, arguments = message
        assert command == "weigh"
        batch = arguments["batch"]
        held = _FIXED + _EACH * batch
        self.batches.append(batch)
        if held > self._runs_out_at:
            return {"out_of_memory": True}
        return {"peak_bytes": held, "reserved_bytes": held, "seconds": 0.001 * batch}


def _survey(child, budget, machine, method="none"):
    begun = Begun(why_not="", batch=32)
    return survey(
        child,
        begun,
        METHODS[method],
        budget_bytes=budget,
        machine_bytes=machine,
        most_seconds=10.0,
    ).measured


def _batches(measured):
    return [each.batch for each in measured.weighed]


def test_a_wide_budget_is_climbed_to_its_end():
    """A wide budget is climbed to its end, and not beyond."""
    found = _survey(_Child(), _FIXED + 50 * _EACH, 10**9)
    assert _batches(found) == [2, 4, 8, 16, 32, 50]
    assert found.stopped == "a batch of 51 would not fit"


def test_few_batches_that_fit_are_followed_beyond_the_budget():
    """Few batches that fit are followed beyond the budget, as far as makes a curve."""
    found = _survey(_Child(), _FIXED + 5 * _EACH, 10**9)
    assert _batches(found) == [2, 4, 5, 8, 16]
    assert found.stopped == "a batch of 6 would not fit"


def test_what_the_machine_has_not_is_not_tried():
    """What the machine has not is not tried; batches between are."""
    child = _Child(runs_out_at=_FIXED + 6 * _EACH)
    found = _survey(child, _FIXED + 5 * _EACH, _FIXED + 6 * _EACH)
    assert _batches(found) == [2, 3, 4, 5]
    assert max(child.batches) == 5


def test_not_even_the_first_batch_fits():
    """Not even the first batch fits: it says so, and measures on what there is."""
    found = _survey(_Child(), _FIXED, 10**9)
    assert _batches(found) == [2, 4, 8, 16, 32]
    assert found.stopped == "a batch of 2 would not fit"


@pytest.mark.parametrize("budget", [_FIXED + 23 * _EACH, _FIXED + 300 * _EACH])
def test_batches_that_are_cut_are_of_whole_parts(budget):
    """Batches that are cut are of whole parts: a line goes through no others."""
    found = _survey(_Child(), budget, 10**9, "accumulate")
    assert len(found.weighed) >= 5
    assert all(batch % METHODS["accumulate"].parts == 0 for batch in _batches(found))
