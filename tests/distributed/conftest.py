"""What tests on several ranks share: the harness that launches them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def launch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Run cases on several ranks: `launch_once` of ``tests/fixtures/ranks.py``."""
    if sys.platform != "linux":
        pytest.skip("processes are started, and killed, as on Linux")
    path = Path(__file__).parents[1] / "fixtures" / "ranks.py"
    spec = importlib.util.spec_from_file_location("mimose_test_ranks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a folder of one of xdist's processes
        shared = shared.parent
    return functools.partial(module.launch_once, shared)
