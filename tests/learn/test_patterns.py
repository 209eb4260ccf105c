"""Which events run in a context, and how their sizes follow from the batch's."""

import numpy as np
import pytest

from mimose.learn.patterns import Pattern
from mimose.learn.sequences import Event
from mimose.learn.size_rules import SizeRule
from mimose.planners.actions import EXACT_MENU
from mimose.predictors import SizeMap

KEEP, RECOMPUTE = EXACT_MENU.names


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lambda h, w: 7, True),
        (lambda h, w: w, True),
        (lambda h, w: -(-h // 4), True),
        (lambda h, w: h * w, True),
        (lambda h, w: (h * 37 + w * 11) % 23, False),
    ],
)
def test_rules_of_own_sizes(rule, found):
    """Constants, copies, halvings and products are found; chance is owned up to."""
    rng = np.random.default_rng(0)
    roots = [tuple(int(v) for v in rng.integers(16, 200, 2)) for _ in range(20)]
    learned = SizeRule(roots[:14], [rule(*root) for root in roots[:14]])
    assert found == learned.is_found
    if found:
        assert [rule(*r) for r in roots[14:]] == [learned(r) for r in roots[14:]]


def test_actions_are_sorted_by_unit_and_call():
    """Each unit gets its calls' actions; calls that are no events are kept."""
    calls = (("a#0", 0, 0, "f"), ("b#1", 1, 1, "f"), ("a#2", 0, 2, "f"))
    pattern = Pattern(tuple(Event(*each) for each in calls), calls=(3, 2))
    assert ((KEEP, KEEP, RECOMPUTE), (KEEP, KEEP)) == pattern.by_unit(
        (KEEP, KEEP, RECOMPUTE), otherwise=KEEP
    )


def _one_event():
    return Pattern((Event("a#0", 0, 0, "f"),), calls=(1,))


def test_rows_that_follow_no_rule_are_bounded_and_seldom_fitted(monkeypatch):
    """The largest and the newest rows stay; hopeless fits get ever rarer."""
    n_fits = 0
    fit = SizeMap.fit

    def counted(self, *args):
        nonlocal n_fits
        n_fits += 1
        return fit(self, *args)

    monkeypatch.setattr(SizeMap, "fit", counted)
    pattern = _one_event()
    rng = np.random.default_rng(0)
    largest = (9, 1000)
    pattern = pattern.taken_in(largest, ((777,),))
    for _ in range(600):
        root = tuple(int(n) for n in rng.integers(1, (8, 900)))
        pattern = pattern.taken_in(root, ((int(rng.integers(1, 900)),),))
        assert len(pattern.own_sizes(root)) == 1
    assert not pattern.follows_rules
    assert len(pattern.rows) == 64
    assert largest in [row.root for row in pattern.rows]
    assert root == pattern.rows[-1].root
    assert n_fits < 25
