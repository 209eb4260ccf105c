"""The cache of plans: the least recently used goes first."""

import threading

from mimose.cost.growth import Growth
from mimose.planners import Plan
from mimose.policy.plan_cache import CachedPlan, PlanCache


def _cached(cost=1.0):
    plan = Plan(
        actions=("recompute",),
        peak_bytes=2.0,
        growth_bytes=1.0,
        extra_cost=cost,
        binding_segments=(),
        planner="test",
        optimal=False,
    )
    return CachedPlan(plan, ("a#0",), (("recompute",),), (1,), Growth(1.0, 1.0), 3.0)


def _is_good(_, today):
    return today == "good"


def _get(cache, key, today="good"):
    return cache.get(key, _is_good, today)


def test_hits_and_misses_are_counted():
    """The first look misses, and those after `put` hit."""
    cache = PlanCache(4)
    assert _get(cache, "a") is None
    made = cache.put("a", _cached())
    assert made is _get(cache, "a")
    assert made is _get(cache, "a")
    assert (2, 1, 1) == (cache.hits, cache.misses, len(cache))
    assert "PlanCache(size=1/4, hits=2, misses=1)" == repr(cache)


def test_a_plan_that_is_no_longer_good_is_dropped():
    """A refused plan counts as a miss and is gone."""
    cache = PlanCache(4)
    cache.put("a", _cached())
    assert _get(cache, "a", "bad") is None
    assert _get(cache, "a") is None
    assert (0, 2, 0) == (cache.hits, cache.misses, len(cache))


def test_the_least_recently_used_goes_first():
    """Looking a plan up makes it young again."""
    cache = PlanCache(2)
    cache.put("a", _cached())
    cache.put("b", _cached())
    _get(cache, "a")
    cache.put("c", _cached())
    assert _get(cache, "b") is None
    assert _get(cache, "a") is not None
    assert _get(cache, "c") is not None


def test_two_threads_agree_on_one_plan():
    """Threads that make plans for one key at once all get the same."""
    cache = PlanCache(2)
    ready = threading.Barrier(8)
    got = []

    def work():
        ready.wait()
        got.append(cache.put("a", _cached()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 8 == len(got)
    assert 1 == len({id(plan) for plan in got})
