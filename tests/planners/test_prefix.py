"""The prefix form says what the timeline says."""

import numpy as np
import pytest

from mimose.planners import peak_bytes
from mimose.planners.prefix import prefix_form, prefix_peak


@pytest.mark.parametrize("nets_by_action", [False, True])
def test_equals_the_timeline(rng, random_problem, every_choice, nets_by_action):
    """The peak of any choice is the same, whatever backwards leave."""
    for _ in range(10):
        problem = random_problem(rng, 5, 3, nets_by_action=nets_by_action)
        form = prefix_form(problem)
        assert form.has_extra == nets_by_action
        choices = every_choice(problem)
        said = [prefix_peak(form, choice) for choice in choices]
        np.testing.assert_allclose(said, peak_bytes(problem, choices), rtol=1e-12)
