"""What a sharded model is: communicating layers, optimizers, states, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # all of a launch is its first test's
_FUNCTIONS = (
    "why_layers_communicate",
    "load_the_first_ranks_state",
    "load_another_shardings_state",
    "refuse_old_wrapper",
)


@pytest.fixture(scope="session")
def told(launch: Callable[..., Any]) -> Any:
    """What each of the functions returned on two ranks."""
    cases = {name: {"do": name} for name in _FUNCTIONS}
    return launch("sharding_cases:", cases, limit_seconds=240.0)


def test_units_that_communicate(told: Any) -> None:
    """Each is named with what communicates in it; a layer's own group does not.

    Nor does what goes over one rank.
    """
    parallel = "has parameters of tensor parallelism"
    expected = {
        "plain": "",
        "one group": "",
        "groups inside": "0 is a separate sharded group (fully_shard), gathered in "
        "each call",
        "groups inside that stay": "",
        "synchronous norm": "1 is a SyncBatchNorm",
        "tensor parallel": f"0 {parallel}",
        "both": f"0 {parallel}",
        "wrapper": "0 is a DistributedDataParallel",
        "old wrapper": "it is a FullyShardedDataParallel",
    }
    assert told["why_layers_communicate"] == [expected, expected]


def test_the_first_ranks_state_serves_all(told: Any) -> None:
    """A run that loads rank 0's state plans from its first step on, on each rank."""
    for phase, reason, settings in told["load_the_first_ranks_state"]:
        assert (phase, reason) == ("plan", "")
        assert "sharding" in settings


def test_states_of_another_sharding_are_refused(told: Any) -> None:
    """Bytes differ by how a model is sharded, but not by how many ranks DDP has."""
    first, second = told["load_another_shardings_state"]
    assert first == second
    sharded, wrapped = (
        {key.split(" in ")[0]: told for key, told in first.items() if where in key}
        for where in ("in FSDPTexts", "in DistributedDataParallel")
    )
    assert sharded["layers"] == wrapped["plain"] == ""
    assert "param_dtype=torch.bfloat16" in sharded["mixed"]
    assert "'Texts' there" in sharded["plain"]
    assert "'FSDPTexts' there" in wrapped["layers"]


def test_fsdp1_is_refused(told: Any) -> None:
    """The error says what to use in its place."""
    for message in told["refuse_old_wrapper"]:
        assert "FSDP1" in message
        assert "fully_shard" in message


def test_deepspeed_is_refused() -> None:
    """It is known by its engine's module."""
    from torch import nn

    import mimose

    class Engine(nn.Module):
        """Stands for one of DeepSpeed's."""

        __module__ = "deepspeed.runtime.engine"

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model = Engine(nn.Sequential(*layers))
    with pytest.raises(mimose.MimoseError, match=r"DeepSpeed.*fully_shard"):
        mimose.attach(model, "1GiB")
