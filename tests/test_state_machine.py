"""A model's life in any order: attached, trained, changed, saved, broken, detached.

``MIMOSE_EXAMPLES=500 python -m pytest tests/test_state_machine.py`` tries so many.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from fuzz import examples
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import mimose

ROWS = st.sampled_from([4, 8, 12, 20])
BUDGETS = st.sampled_from(["+1MiB", "+60KiB", "1GiB"])
PLACES = st.integers(0, 2)


class _BrokenError(RuntimeError):
    """What a layer, or a gradient, raises."""


class Life(RuleBasedStateMachine):
    """A model under sessions, and a twin that does the same without."""

    toys: Any = None

    @initialize()
    def begin(self) -> None:
        """Make both, with nothing attached."""
        self.counting = self.toys.counting()
        self.meter = self.counting.__enter__()
        self.model = self.toys.chain(3)
        with self.toys.untracked():
            self.twin = copy.deepcopy(self.model)
        self.session: Any = None
        self.saved: Any = None
        self.is_other = False
        self.n_steps = self.n_runs = 0
        self._new_optimizers()

    def _new_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=1e-2)
            for model in (self.model, self.twin)
        ]

    def teardown(self) -> None:
        """Let everything go."""
        if hasattr(self, "counting"):
            if self.session is not None:
                self.detach()
            self.counting.__exit__(None, None, None)

    def _both(self, run: Any) -> list[Any]:
        """Run something with the model and with its twin, as if alone."""
        self.n_runs += 1
        results = []
        for model in (self.model, self.twin):
            torch.manual_seed(self.n_runs)
            if model is self.twin:
                with self.toys.untracked():
                    results.append(run(model))
            else:
                results.append(run(model))
        return results

    def _backward(self, rows: int) -> None:
        self._both(lambda model: model(self.toys.inputs(rows)).backward())
        self.n_steps += self.session is not None

    # ------------------------------------------------------------------ rules

    @precondition(lambda self: self.session is None)
    @rule(budget=BUDGETS, refine=st.booleans())
    def attach(self, budget: str, refine: bool) -> None:
        """Plan for the model from now on."""
        self.session = mimose.attach(
            self.model, budget, meter=self.meter, refine=refine, on_infeasible="warn"
        )
        self.n_steps = 0

    @rule(rows=ROWS)
    def accumulate(self, rows: int) -> None:
        """Run forward and backward."""
        self._backward(rows)

    @rule(rows=ROWS, apart=st.booleans())
    def step(self, rows: int, apart: bool) -> None:
        """Run forward and backward, and the optimizer's step."""
        if self.session is not None and apart:
            run = self.session.step
            self._both(
                lambda model: (run if model is self.model else _call)(
                    lambda: model(self.toys.inputs(rows)).backward()
                )
            )
            self.n_steps += 1
        else:
            self._backward(rows)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @rule(rows=ROWS)
    def evaluate(self, rows: int) -> None:
        """Run without gradients, in evaluation mode."""

        def run(model: Any) -> torch.Tensor:
            model.eval()
            with torch.no_grad():
                found: torch.Tensor = model(self.toys.inputs(rows))
            model.train()
            return found

        one, other = self._both(run)
        assert torch.equal(one, other)

    @precondition(lambda self: self.session is not None)
    @rule()
    def save(self) -> None:
        """Keep what was learned, as a file would."""
        self.saved = json.loads(json.dumps(self.session.state_dict()))
        self.is_other = False

    @precondition(lambda self: self.session is not None and self.saved is not None)
    @rule()
    def load(self) -> None:
        """Take over what was learned, unless the model is another by now."""
        try:
            self.session.load_state_dict(self.saved)
        except mimose.exceptions.StateMismatchError:
            assert self.is_other

    @precondition(lambda self: self.session is not None)
    @rule(budget=BUDGETS)
    def move(self, budget: str) -> None:
        """Set another budget."""
        self.session.budget = budget

    @rule(place=PLACES, width=st.sampled_from([16, 24]))
    def replace(self, place: int, width: int) -> None:
        """Put another layer in the place of one."""
        torch.manual_seed(place)
        block = self.toys.Block(16)
        block.up = torch.nn.Linear(16, 2 * width)
        block.down = torch.nn.Linear(2 * width, 16)
        self.model.blocks[place] = block
        with self.toys.untracked():
            self.twin.blocks[place] = copy.deepcopy(block)
        self.is_other = True
        self._both(lambda model: model.zero_grad())
        self._new_optimizers()

    @rule(place=PLACES, is_trained=st.booleans())
    def freeze(self, place: int, is_trained: bool) -> None:
        """Train a layer no more, or again."""
        for model in (self.model, self.twin):
            model.blocks[place].requires_grad_(is_trained)
        self._both(lambda model: model.zero_grad())

    @rule(rows=ROWS, place=PLACES, in_backward=st.booleans())
    def fail(self, rows: int, place: int, in_backward: bool) -> None:
        """Break a step off in a layer's forward, or in backward behind it."""

        def stop(*_: Any) -> None:
            raise _BrokenError

        def stop_later(_: Any, __: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(stop)

        def run(model: Any) -> None:
            block = model.blocks[place]
            handle = block.register_forward_hook(stop_later if in_backward else stop)
            with contextlib.suppress(_BrokenError):
                model(self.toys.inputs(rows)).backward()
            handle.remove()
            model.zero_grad()

        self._both(run)
        self.n_steps += self.session is not None

    @precondition(lambda self: self.session is not None)
    @rule()
    def detach(self) -> None:
        """Plan for the model no more."""
        self.session.detach()
        assert self.n_steps == self.session.summary().steps
        self.session = None
        assert [] == self.toys.leftovers(self.model)

    # ------------------------------------------------------------------ always

    @invariant()
    def equal(self) -> None:
        """Weights and gradients are the twin's, to the bit."""
        if not hasattr(self, "twin"):
            return
        with self.toys.untracked():
            pairs = zip(
                self.model.named_parameters(), self.twin.named_parameters(), strict=True
            )
            for (name, one), (_, other) in pairs:
                assert torch.equal(one, other), name
                assert (one.grad is None) == (other.grad is None), name
                assert one.grad is None or torch.equal(one.grad, other.grad), name

    @invariant()
    def told(self) -> None:
        """What a session tells can be asked at any time."""
        if getattr(self, "session", None) is not None:
            summary = self.session.summary()
            assert self.n_steps - 1 <= summary.steps <= self.n_steps
            assert summary.budget_bytes == self.session.budget
            assert self.session.report()
            assert json.dumps(self.session.state_dict())


def _call(run: Any) -> Any:
    return run()


def test_a_life_in_any_order(toys: Any) -> None:
    """Whatever comes after what: results are the twin's, and nothing is left."""
    machine = type("Machine", (Life,), {"toys": toys})
    machine.TestCase.settings = examples(6, stateful_step_count=30)
    machine.TestCase("runTest").runTest()
    gc.collect()
