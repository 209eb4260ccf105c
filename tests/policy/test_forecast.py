"""Which steps follow a batch, learned from those that did."""

from mimose.policy.forecast import Forecasts
from mimose.types import StepInput


def _step(*sizes, context="c", has_gradients=False):
    return StepInput(context, sizes, has_gradients)


def test_sizes_follow_from_the_batchs():
    """As they are, swapped, cut into parts and padded: whatever all batches show."""
    forecasts = Forecasts()
    for length in (7, 12, 33, 64):
        padded = -(-length // 8) * 8
        step = _step(16, padded, length, 2 * length)
        forecasts.learn("k", (length, 16), [step])
    assert [_step(16, 24, 20, 40)] == forecasts.of("k", (20, 16))


def test_a_size_that_never_moved_is_the_batchs_own():
    """The last batch of an epoch has fewer texts, for the first time."""
    forecasts = Forecasts()
    for length in (7, 12):
        forecasts.learn("k", (16, length), [_step(16, length)])
    assert [_step(5, 9)] == forecasts.of("k", (5, 9))


def test_nothing_is_foretold_of_what_was_not_seen():
    """Another kind of batch, one single batch, and sizes that follow no rule."""
    forecasts = Forecasts()
    forecasts.learn("k", (3, 4), [_step(3, 4)])
    assert [] == forecasts.of("other", (3, 4))
    assert [_step(3, 4)] == forecasts.of("k", (3, 4))
    assert [] == forecasts.of("k", (3, 5))
    for sizes, own in (((3, 5), 71), ((3, 6), 12), ((3, 7), 45), ((3, 8), 13)):
        forecasts.learn("k", sizes, [_step(own)])
    assert _step(45) in forecasts.of("k", (3, 7))
    assert [] == [s for s in forecasts.of("k", (3, 9)) if len(s.sizes) == 1]


def test_all_steps_of_a_batch_and_of_those_by_turns():
    """Parts of a batch, and gradients that are there at every second one."""
    forecasts = Forecasts()
    for number, length in enumerate((7, 12, 33, 64)):
        has_gradients = bool(number % 2)
        first = _step(length, has_gradients=has_gradients)
        forecasts.learn("k", (length,), [first, _step(2 * length, context="d")])
    expected = {_step(9), _step(9, has_gradients=True), _step(18, context="d")}
    assert expected == set(forecasts.of("k", (9,)))
