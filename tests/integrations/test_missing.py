"""Which package an import failed for, and what the callbacks say then."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")


_HIDING = """
import importlib.abc
import sys

class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hiding())
import {module}
"""


@pytest.mark.parametrize(
    ("module", "hidden", "complaint"),
    [
        (
            "transformers",
            ["transformers"],
            "needs transformers and accelerate: pip install",
        ),
        ("lightning", ["lightning", "pytorch_lightning"], "pip install"),
    ],
)
def test_a_callback_without_its_trainer(
    module: str, hidden: list[str], complaint: str
) -> None:
    """One line says which of mimose's extras brings what is missing."""
    code = _HIDING.format(hidden=hidden, module=f"mimose.integrations.{module}")

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )

    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: mimose.integrations.{module} needs ")
    assert complaint in last
    assert last.endswith(f"pip install 'mimose[{module}]'")
