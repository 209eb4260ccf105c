"""A plugin for pytest that puts `MimoseCallback` among the Trainer's default callbacks.

`scripts/upstream_tests` runs the tests of transformers itself under it. What they run
under is named by the environment variable `MIMOSE_UPSTREAM`:

- ``plain``: transformers as it is.
- ``class``: the callback is a default one, and new for each trainer. The tests' models
  compute `input_x * a + b` with parameters of their own and have no module inside, so
  there is nothing to plan for.
- ``layers``: the same, and the regression models compute that line in a module without
  parameters, which is then a layer: names, `state_dict` and results stay as they are.
- ``instance``: as ``layers``, with one callback for all trainers of the process.

Where a test compares the states of two trainings, what was measured in them is left
out: a fresh measurement is never equal to the last bit. At the end it says how many
sessions there were and how many steps they planned, so that a run in which nothing was
planned is not taken for one that passed.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import trainer as hf_trainer

from mimose import session as mimose_session
from mimose.integrations.transformers import MimoseCallback

_MODE = os.environ.get("MIMOSE_UPSTREAM", "plain")
_MODELS = ("RegressionModel", "RegressionPreTrainedModel")
_counted: collections.Counter[str] = collections.Counter()


class DefaultMimoseCallback(MimoseCallback):
    """A callback that can be made without arguments, as default callbacks are."""

    def __init__(self, budget: float | str = "1TiB", **options: Any) -> None:
        super().__init__(budget, **({"on_infeasible": "warn"} | options))


class Line(nn.Module):
    """A line, with its parameters given."""

    def forward(
        self, x: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor
    ) -> torch.Tensor:
        """Compute it."""
        return x * slope + offset


def pytest_configure(config: pytest.Config) -> None:
    """Add the callback, once, before any test is imported."""
    del config
    if _MODE == "plain":
        return
    shared = _MODE == "instance"
    hf_trainer.DEFAULT_CALLBACKS.append(
        DefaultMimoseCallback() if shared else DefaultMimoseCallback
    )
    _count_sessions()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave measurements out of comparisons; give the regression models a layer."""
    if _MODE == "plain":
        return
    modules = {getattr(item, "module", None) for item in items}
    utils = {f"{m.__package__}.trainer_test_utils" for m in modules if m is not None}
    for name in utils & set(sys.modules):
        _compare_the_rest(sys.modules[name].TrainerIntegrationCommon)
        for model in _MODELS if _MODE != "class" else ():
            _with_line(getattr(sys.modules[name], model))


def _compare_the_rest(tests: Any) -> None:
    """Compare two runs' states but for what this library measured in them.

    Bytes and seconds differ from run to run, as `train_runtime` does, which the
    tests leave out themselves.
    """
    compare = tests.check_trainer_state_are_the_same

    def rest(state: dict[str, Any]) -> dict[str, Any]:
        callbacks = dict(state["stateful_callbacks"])
        callbacks.pop(DefaultMimoseCallback.__name__, None)
        logs = [
            {key: value for key, value in log.items() if not key.startswith("mimose/")}
            for log in state["log_history"]
        ]
        return state | {"stateful_callbacks": callbacks, "log_history": logs}

    def compare_rest(self: Any, state: Any, other: Any) -> None:
        compare(self, rest(state), rest(other))

    tests.check_trainer_state_are_the_same = compare_rest


def _with_line(model: type[nn.Module]) -> None:
    made, plain = model.__init__, model.forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.line = Line()

    @functools.wraps(plain)  # the trainer reads the signature
    def forward(self: Any, input_x: Any, labels: Any = None, **_: Any) -> Any:
        y = self.line(input_x, self.a, self.b)
        outputs = (y, y) if self.double_output else (y,)
        if labels is None:
            return outputs
        return nn.functional.mse_loss(y, labels), *outputs

    model.__init__ = init  # type: ignore[method-assign]
    model.forward = forward
    model._no_split_modules = ["Line"]  # type: ignore[assignment]


def _count_sessions() -> None:
    """Count sessions, and the steps that each has recorded by its detach."""
    made = mimose_session.Session.__init__
    left = mimose_session.Session.detach

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _counted["sessions"] += 1

    def detach(self: Any) -> None:
        if hasattr(self, "records") and not getattr(self, "_was_counted", False):
            self._was_counted = True
            for record in self.records:
                _counted[f"steps {record.phase}"] += 1
        left(self)

    mimose_session.Session.__init__ = init  # type: ignore[method-assign]
    mimose_session.Session.detach = detach  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what the sessions did."""
    told = ", ".join(f"{count} {what}" for what, count in sorted(_counted.items()))
    terminalreporter.write_line(f"mimose ({_MODE}): {told or 'no sessions'}")
