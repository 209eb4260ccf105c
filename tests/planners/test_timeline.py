"""The judge of peaks, against a walk through the step in plain Python."""

import numpy as np
import pytest

from mimose.planners import lay_out, peak_bytes


def slow_segments(problem, choice):
    """Walk the step, one number at a time: (name, level at start, peak) a segment."""
    level, rows = problem.start_bytes, []

    def segment(name, retained, transient):
        nonlocal level
        rows.append((name, level, max(level + transient, level + retained)))
        level += retained

    for e, call in enumerate(problem.calls):
        gap, transient = problem.gap_bytes[e], problem.gap_transient_bytes[e]
        segment(f"gap before {call}", gap, transient)
        held = problem.held_bytes[e, choice[e]]
        transient = problem.forward_transient_bytes[e, choice[e]]
        segment(f"forward of {call}", held, transient)
    segment("head", problem.gap_bytes[-1], problem.gap_transient_bytes[-1])
    for e in reversed(range(len(problem.calls))):
        retained = problem.backward_retained_bytes[e] - problem.held_bytes[e, choice[e]]
        transient = problem.backward_transient_bytes[e, choice[e]]
        segment(f"backward of {problem.calls[e]}", retained, transient)
    return rows


def random_choice(rng, problem, n_plans):
    """Draw (n_plans, E) choices, allowed or not: the judge judges any."""
    return rng.integers(0, len(problem.actions), (n_plans, len(problem.calls)))


@pytest.mark.parametrize("n_calls", [0, 1, 7, 24])
def test_equals_the_slow_walk(rng, make, n_calls):
    """Levels, peaks and names of all segments are those of the slow walk."""
    for _ in range(20):
        problem = make.random(rng, n_calls, 3, host=True)
        choice = random_choice(rng, problem, 1)[0]
        names, levels, peaks = zip(*slow_segments(problem, choice), strict=True)
        laid_out = lay_out(problem, choice)
        assert names == laid_out.segments
        assert list(levels) == laid_out.level_bytes.tolist()
        assert list(peaks) == laid_out.peak_bytes_by_segment.tolist()
        assert max(peaks) == laid_out.peak_bytes
        choices = random_choice(rng, problem, 9)
        many = [lay_out(problem, each).peak_bytes for each in choices]
        assert many == peak_bytes(problem, choices).tolist()


def test_binding_segments(make):
    """All segments that reach the peak are named, in the order of time."""
    problem = make.problem(
        2,
        held_bytes=np.array([[3.0, 0.0], [3.0, 0.0]]),
        backward_transient_bytes=np.array([[3.0, 0.0], [0.0, 0.0]]),
    )
    laid_out = lay_out(problem, np.array([0, 0]))
    assert laid_out.peak_bytes == 6.0
    expected = (
        "forward of layer.1#0",
        "head",
        "backward of layer.1#0",
        "backward of layer.0#0",
    )
    assert expected == laid_out.binding_segments


def test_holders_add_up_to_the_peak(rng, make):
    """What is said to hold the bytes at the peak holds all of them."""
    for turn in range(100):
        problem = make.random(rng, turn % 6, 3)
        laid_out = lay_out(problem, random_choice(rng, problem, 1)[0])
        assert laid_out.peak_bytes == pytest.approx(sum(laid_out.holders().values()))
