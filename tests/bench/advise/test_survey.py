"""The ladder of batches whose memory is measured."""

import math

import pytest

from mimose.bench.advise.measured import Weighed
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.survey import Begun, survey
from mimose.bench.child import RunFailedError

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


def test_slow_steps_still_make_a_line():
    """The first few steps may take longer than the last one: a line needs them."""

    class Slow(_Child):
        def ask(self, message):
            return {**super().ask(message), "seconds": 0.02 * message[1]["batch"]}

    begun = Begun(why_not="", batch=32)
    found = survey(
        Slow(),
        begun,
        METHODS["none"],
        budget_bytes=10**9,
        machine_bytes=10**9,
        most_seconds=0.03,
    ).measured
    assert {2, 4, 8} <= set(_batches(found))
    assert max(_batches(found)) == 16
    assert "too long to go on" in found.stopped


class _Planner(_Child):
    """Plans for any batch; knows no lengths, and cannot train on few samples."""

    dies = False
    slow = False

    def ask(self, message):
        command, arguments = message
        if command == "learned" and self.dies:
            msg = "the process was ended by signal 9"
            raise RunFailedError(msg)
        if command in ("learn", "learned"):
            return {"learned": {}}
        if command == "weigh":
            if arguments["batch"] < 8:
                return {"failed": "ValueError: too few samples"}
            return super().ask(message)
        assert {length for _, length in arguments["points"]} == {None}
        return {
            "table": [
                {
                    "batch": batch,
                    "length": None,
                    "least_bytes": _FIXED + _EACH * batch,
                    "keep_bytes": _FIXED + 2 * _EACH * batch,
                    "seconds": (0.0,),
                }
                for batch, _ in arguments["points"][: 1 if self.slow else None]
            ]
        }


def _plain():
    held = {"peak_bytes": 1, "reserved_bytes": 1, "seconds": 0.1}
    return [Weighed(batch=b, length=None, **held) for b in (8, 16, 32)]


def _planned(child):
    return survey(
        child,
        Begun(why_not="", batch=32),
        METHODS["mimose"],
        budget_bytes=_FIXED + 70 * _EACH,
        machine_bytes=10**9,
        most_seconds=10.0,
        plain=_plain(),
    )


def test_plans_that_were_foretold_stay_where_time_runs_out():
    """One plan a question is all there is time for: they add up, and none is lost."""
    child = _Planner()
    child.slow = True
    found = _planned(child).measured
    assert [each.batch for each in found.foretold] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert _batches(found) == [8, 16, 32, 64, 70]


def test_a_process_that_dies_at_its_end_has_measured():
    """What was measured stays; only what its session had learned is gone."""
    child = _Planner()
    child.dies = True
    found = _planned(child)
    assert found.learned is None
    assert found.measured.stopped == "it failed: the process was ended by signal 9"
    assert _batches(found.measured) == [8, 16, 32, 64, 70]


def test_plans_are_of_sizes_that_plain_training_ran():
    """Of no smaller batches, and of no lengths where it failed at other lengths."""
    plain = _plain()
    held = {"peak_bytes": 1, "reserved_bytes": 1, "seconds": 0.1}
    plain.append(Weighed(batch=32, length=24, **held))
    found = survey(
        _Planner(),
        Begun(why_not="", batch=32, length=24),
        METHODS["mimose"],
        budget_bytes=_FIXED + 70 * _EACH,
        machine_bytes=10**9,
        most_seconds=10.0,
        plain=plain,
    ).measured
    assert found.why_not == ""
    assert _batches(found) == [8, 16, 32, 64, 70]
