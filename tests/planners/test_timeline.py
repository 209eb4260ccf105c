"""The judge of peaks, against a walk through the step in plain Python."""

import numpy as np
import pytest

from mimose.planners import lay_out, peak_bytes


def slow_segments(problem, choice):
    """Walk the step, one number at a time: (name, level at start, peak) a segment."""
    level, rows = problem.start_bytes, []

    def segment(name, net, excess):
        nonlocal level
        rows.append((name, level, max(level + excess, level + net)))
        level += net

    goes = []
    for e, event in enumerate(problem.events):
        a = choice[e]
        is_free = e == 0 or not problem.saves_output[e - 1, choice[e - 1]]
        is_gone = problem.releases_input[e, a] and is_free
        goes.append(problem.input_bytes[e] if is_gone else 0.0)
        gap, excess = problem.gap_bytes[e], problem.gap_excess_bytes[e]
        segment(f"gap before {event}", gap, excess)
        held = problem.held_bytes[e, a]
        excess = max(held, problem.forward_excess_bytes[e, a])
        segment(f"forward of {event}", held - goes[e], excess)
    segment("head", problem.gap_bytes[-1], problem.gap_excess_bytes[-1])
    for e in reversed(range(len(problem.events))):
        a = choice[e]
        held = problem.held_bytes[e, a] - goes[e]
        net = problem.backward_net_bytes[e, a] - held
        excess = problem.backward_excess_bytes[e, a] + goes[e]
        segment(f"backward of {problem.events[e]}", net, excess)
    state = problem.optimizer_state_bytes
    segment("optimizer step", state, state + problem.step_excess_bytes)
    return rows


def random_choice(rng, problem, n_plans):
    """Draw (n_plans, E) choices, allowed or not: the judge judges any."""
    return rng.integers(0, len(problem.actions), (n_plans, len(problem.events)))


@pytest.mark.parametrize(("nets_by_action", "pairs"), [(False, False), (True, True)])
@pytest.mark.parametrize("n_events", [0, 1, 7, 24])
def test_equals_the_slow_walk(rng, random_problem, n_events, nets_by_action, pairs):
    """Levels, peaks and names of all segments are those of the slow walk."""
    for _ in range(20):
        problem = random_problem(
            rng, n_events, 3, nets_by_action=nets_by_action, pairs=pairs
        )
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


def test_binding_segments(make_problem):
    """All segments that reach the peak are named, in the order of time."""
    problem = make_problem(
        2,
        held_bytes=np.array([[3.0, 0.0], [3.0, 0.0]]),
        backward_excess_bytes=np.array([[3.0, 0.0], [0.0, 0.0]]),
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


def test_holders_add_up_to_the_peak(rng, random_problem):
    """What is said to hold the bytes at the peak holds all of them."""
    for turn in range(100):
        problem = random_problem(rng, turn % 6, 3, pairs=turn > 50)
        laid_out = lay_out(problem, random_choice(rng, problem, 1)[0])
        assert laid_out.peak_bytes == pytest.approx(sum(laid_out.holders().values()))


def boundary(make_problem, saves, releases):
    """Two events, the first of which may save what the second may let go."""
    return make_problem(
        2,
        held_bytes=np.array([[10.0, 8.0], [3.0, 2.0]]),
        backward_excess_bytes=np.array([[1.0, 1.0], [6.0, 6.0]]),
        gap_excess_bytes=np.array([0.0, 0.0, 40.0]),
        input_bytes=np.array([0.0, 4.0]),
        releases_input=np.array([[False, False], [False, releases]]),
        saves_output=np.array([[saves, False], [False, False]]),
        start_bytes=100.0,
    )


@pytest.mark.parametrize(
    ("saves", "releases", "choice", "less"),
    [
        (False, True, (0, 1), 4.0),
        (True, True, (0, 1), 0.0),
        (True, True, (1, 1), 4.0),
        (True, True, (1, 0), 0.0),
        (True, False, (1, 1), 0.0),
    ],
)
def test_an_input_goes_where_nobody_else_holds_it(
    make_problem, saves, releases, choice, less
):
    """Between the exit and the backward; the event's own peaks stay."""
    choice = np.array(choice)
    as_stated = lay_out(boundary(make_problem, saves, False), choice)
    laid_out = lay_out(boundary(make_problem, saves, releases), choice)
    lower = as_stated.peak_bytes_by_segment - laid_out.peak_bytes_by_segment
    assert lower.tolist() == [0, 0, 0, 0, less, 0, 0, 0]
    # Before the head and before the event's own backward.
    lower = as_stated.level_bytes - laid_out.level_bytes
    assert lower.tolist() == [0, 0, 0, 0, less, less, 0, 0]
