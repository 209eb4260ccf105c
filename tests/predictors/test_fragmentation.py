"""An upper envelope of reserved over requested growth."""

from __future__ import annotations

import json

import pytest

from mimose.predictors import FragmentationRatio

MIB = 2**20


def _seen(*pairs, **options):
    ratio = FragmentationRatio(**options)
    for requested, reserved in pairs:
        ratio.observe(requested * MIB, reserved * MIB)
    return ratio


def test_a_prior_holds_until_something_was_seen():
    """Before any observation the prior is all there is."""
    assert 1.5 == FragmentationRatio().value
    assert 1.2 == FragmentationRatio(prior=1.2).value


def test_it_covers_the_highest_seen():
    """No step of the window took a larger share than the ratio says."""
    ratios = [1.1, 1.3, 1.15, 1.2, 1.25] * 8
    ratio = _seen(*((100, 100 * each) for each in ratios))
    assert 1.3 <= ratio.value < 1.35


def test_the_prior_fades():
    """Forty steps without any fragmentation leave next to nothing on top."""
    assert 1.0 <= _seen(*[(100, 100)] * 40).value < 1.001


def test_steps_of_one_kind_count_once():
    """However often they repeat each other, nothing is known of other kinds."""
    alike, different = FragmentationRatio(), FragmentationRatio()
    for n in range(40):
        alike.observe(100 * MIB, 100 * MIB, kind="plan")
        different.observe(100 * MIB, 100 * MIB, kind=n)
    assert alike.value == pytest.approx(_seen((100, 100)).value)
    assert alike.value > 1.3
    assert different.value < 1.001


def test_two_segments_are_little_of_large_steps():
    """At ten gigabytes one plan may repeat for ever, and leaves room for others."""
    alike = FragmentationRatio()
    for _ in range(40):
        alike.observe(10 * 2**30, 10 * 2**30, kind="plan")
    assert alike.value < 1.005


def test_one_odd_kind_is_no_more_than_it_is():
    """Many repeats of another do not spread it."""
    ratio = FragmentationRatio()
    for _ in range(255):
        ratio.observe(100 * MIB, 100 * MIB, kind="plan")
    ratio.observe(100 * MIB, 130 * MIB, kind="odd")
    assert 1.3 < ratio.value < 1.45


def test_a_state_without_kinds_can_be_loaded():
    """Entries of two numbers are unlike each other."""
    ratio = FragmentationRatio()
    ratio.load_state_dict({"seen": [[100, 100]] * 40})
    assert ratio.value < 1.001


def test_small_steps_count_by_what_they_leave_for_large_ones():
    """Twice a small step's growth is little of what a large one takes."""
    large = [(100, 110)] * 60
    assert _seen(*large, (10, 20)).value == pytest.approx(
        _seen(*large, (10, 11)).value, rel=0.02
    )
    assert _seen(*large, (60, 120)).value > 1.4


def test_it_forgets_what_left_the_window():
    """One bad step counts for as long as the window."""
    assert _seen((100, 190), *[(100, 105)] * 16, window=16).value < 1.1


def test_steps_that_do_not_grow_tell_nothing():
    """Nothing requested gives no share; what was given back is no growth."""
    assert 1.5 == _seen((0, 10)).value
    assert _seen(*[(100, -5)] * 60).value == pytest.approx(1.0, rel=1e-3)


def test_state_goes_through_json():
    """Another one that loads the state gives the same ratio."""
    one = _seen((100, 120), (90, 130))
    for kind in (("text", 4), "other", "other"):
        one.observe(100, 110, kind)
    other = FragmentationRatio()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.value == other.value


@pytest.mark.parametrize(
    "options", [{"prior": 0.5}, {"floor": -1.0}, {"window": 0}], ids=str
)
def test_parameters_out_of_range_are_refused(options):
    """A prior below the floor, a negative floor, an empty window."""
    with pytest.raises(ValueError, match="are needed"):
        FragmentationRatio(**options)
