"""Which events run in a context, and how their sizes follow from the batch's."""

import numpy as np

from mimose.cost.patterns import Pattern
from mimose.cost.sequences import Event
from mimose.planners.actions import EXACT_MENU
from mimose.predictors import SizeMap

KEEP, RECOMPUTE = EXACT_MENU.names


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
