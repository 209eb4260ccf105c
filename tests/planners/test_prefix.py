"""The prefix form says what the timeline says."""

import numpy as np
import pytest

from mimose.planners import peak_bytes
from mimose.planners.prefix import prefix_form, prefix_peak


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("nets_by_action", [False, True])
def test_equals_the_timeline(rng, random_problem, every_choice, nets_by_action, pairs):
    """The peak of any choice is the same, whatever backwards leave and share."""
    for _ in range(10):
        problem = random_problem(rng, 5, 3, nets_by_action=nets_by_action, pairs=pairs)
        form = prefix_form(problem)
        assert form.has_extra == nets_by_action
        choices = every_choice(problem)
        said = [prefix_peak(form, choice) for choice in choices]
        np.testing.assert_allclose(said, peak_bytes(problem, choices), rtol=1e-12)


def test_pairs_without_a_choice_are_none(make_problem):
    """Where the event before always saves its output, or never, nothing is shared."""
    fields = {
        "held_bytes": np.array([[9.0, 5.0]] * 3),
        "input_bytes": np.array([1.0, 2.0, 4.0]),
        "releases_input": np.array([[False, True]] * 3),
    }
    for saves, held in ((False, [4.0, 3.0, 1.0]), (True, [4.0, 5.0, 5.0])):
        problem = make_problem(3, saves_output=np.full((3, 2), saves), **fields)
        form = prefix_form(problem)
        assert not form.has_pairs
        assert not form.saves_output.any()
        assert held == form.held_bytes[:, 1].tolist()
    either = np.array([[True, False]] * 3)
    form = prefix_form(make_problem(3, saves_output=either, **fields))
    assert form.has_pairs
    assert [0.0, 2.0, 4.0] == form.shared_bytes[:, 1].tolist()
    # What the last event hands on nobody lets go.
    assert [True, True, False] == form.saves_output[:, 0].tolist()
