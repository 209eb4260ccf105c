"""What all tests share: threads, versions in the header, the markers gpu and sim."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_WORKER = "PYTEST_XDIST_WORKER"

# Before anything imports torch. Spinning OpenMP threads beside another busy process
# slow a step down many times over; nothing in the tests may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1" if _WORKER in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_SHOWN = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "cachetools")


def pytest_report_header() -> str:
    """Name the versions a failure may depend on."""
    shown = [f"{platform.system()} {platform.machine()}"]
    for name in _SHOWN:
        try:
            shown.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            shown.append(f"{name} missing")
    return "with: " + ", ".join(shown)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is no accelerator; put those marked sim last.

    The simulated accelerator, once loaded, is torch's accelerator for the rest of the
    process: nothing else may run after it. To tests marked gpu it is none: they are
    judged here, before it is there.
    """
    items.sort(key=lambda item: item.get_closest_marker("sim") is not None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _accelerator_is_there():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="torch sees no accelerator"))


def _accelerator_is_there() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.accelerator.is_available()


@pytest.fixture(autouse=True)
def _inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sessions learn and plan in their steps: each run is like any other.

    Tests marked worker get the thread; all do where MIMOSE_TESTS_WORKER is set.
    """
    if "torch" not in sys.modules or request.node.get_closest_marker("worker"):
        return
    if os.environ.get("MIMOSE_TESTS_WORKER"):
        return
    from mimose.runtime import engine
    from mimose.worker import Worker

    monkeypatch.setattr(engine, "Worker", lambda *, is_inline: Worker(is_inline=True))


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """Put what imports have left out of the collector's sight, module by module.

    That is most of a million objects, which each full collection would walk through
    for some tenths of a second, and tests ask for hundreds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def sim() -> Iterator[Any]:
    """The simulated accelerator as torch's accelerator: ``torch.sim``.

    Autograd starts a thread for each device it sees in the process's first backward,
    and none later: so backwards run in the caller's.
    """
    torch = pytest.importorskip("torch")
    from mimose.sim import use, why_not

    reason = why_not()
    if reason:
        pytest.skip(reason)
    device = use()
    with torch.autograd.set_multithreading_enabled(False):
        yield device


@pytest.fixture(autouse=True)
def _sim_as_new(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin each test marked sim with a simulated accelerator as new."""
    if request.node.get_closest_marker("sim") is None:
        yield
        return
    device = request.getfixturevalue("sim")
    _reset(device)
    yield
    from mimose.memory.wall import active_walls

    assert not active_walls, "a session's or a proof's wall was left standing"
    _reset(device)


def _reset(device: Any) -> None:
    if device.reset():  # something is held: by a cycle, perhaps
        gc.collect()
        device.reset()


@pytest.fixture(scope="session")
def toys() -> Any:
    """Toy models and helpers: the module ``tests/fixtures/toys.py``."""
    return importlib.import_module("toys")


@pytest.fixture
def meter(toys: Any) -> Iterator[Any]:
    """Hand out an exact meter of all that operators make during the test."""
    with toys.counting() as counting:
        yield counting
