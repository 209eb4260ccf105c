"""Shapes that are waiting, and when plans are asked for."""

import torch

from mimose.learn.problem import Memory
from mimose.run.ahead import Ahead, Waiting
from mimose.types import StepInput
from mimose.watch.batches import BatchShape, batch_shape

MEMORY = Memory(100.0, 10.0, 0.0, 0.0)


def test_shapes_wait_until_a_batch_of_theirs_has_come():
    """Each as often as it was told, whatever the order."""
    waiting, one, other = Waiting(), *(BatchShape("k", (n,), ()) for n in (1, 2))
    for shape in (one, other, one):
        waiting.add(shape)
    waiting.came(one)
    assert [one, other] == list(waiting)
    waiting.came(one)
    assert [other] == list(waiting)
    waiting.came(one)
    assert [other] == list(waiting)
    waiting.clear()
    assert [] == list(waiting)


def test_masks_are_known_from_where_the_batch_was_made():
    """On an accelerator nobody waits for them: the first told of these sizes counts."""
    waiting = Waiting()
    told = BatchShape("k", (3, 4), ("mask",))
    waiting.add(told)
    assert told == waiting.came(BatchShape("k", (3, 4), None))
    assert BatchShape("k", (3, 4), None) == waiting.came(BatchShape("k", (3, 4), None))


class _Parts:
    """A policy, a learner and a describer that take note of what they are asked."""

    def __init__(self):
        self.model = self
        self.version = self.valid_since = 0
        self.knows = False
        self.asked = []

    def table(self, structure):
        """Know every structure."""
        return self

    def prepare(self, facts, table, memory):
        """Take note."""
        self.asked.append(facts.sizes)
        return self.knows


def test_a_plan_is_asked_for_again_only_where_something_is_new():
    """Once more when more was learned, or when all plans were thrown away."""
    parts, waiting = _Parts(), Waiting()
    ahead = Ahead(parts, parts, parts, lambda: MEMORY)

    def asked(n_rows):
        parts.asked.clear()
        ahead.hand(torch.zeros(n_rows, 2), waiting)
        ahead.ran(StepInput("c", (n_rows, 2), has_gradients=False, structure="s"))
        return list(parts.asked)

    waiting.add(batch_shape(torch.zeros(9, 2)))
    assert [] == asked(3) == asked(4)  # what follows such batches is not known yet
    assert [(9, 2)] == asked(5)
    assert [] == asked(6)
    parts.version = 1
    parts.knows = True
    assert [(9, 2)] == asked(6)
    parts.version = 2
    assert [] == asked(6)
    parts.valid_since = 2
    assert [(9, 2)] == asked(6)
    ahead.close()
    parts.valid_since = 3
    assert [] == asked(6)
