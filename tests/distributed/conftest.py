"""What tests on several ranks share: the harness that launches them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def launch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Run cases on several ranks: `launch_once` of ``tests/fixtures/ranks.py``."""
    if sys.platform != "linux":
        pytest.skip("processes are started, and killed, as on Linux")
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a folder of one of xdist's processes
        shared = shared.parent
    return functools.partial(importlib.import_module("ranks").launch_once, shared)
