"""Which package an import failed for, and what the callbacks say then."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from mimose.integrations.missing import missing_package

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


def test_the_innermost_module_is_the_missing_one() -> None:
    """A lazy import names a class; the error it was raised from names the package."""
    inner = ModuleNotFoundError("No module named 'accelerate'", name="accelerate.utils")
    outer = ModuleNotFoundError("Could not import module 'Trainer'")
    outer.__cause__ = inner

    assert missing_package(inner) == missing_package(outer) == "accelerate"


def test_another_error_names_no_package() -> None:
    """A name that is not in a module is none that could be installed."""
    assert missing_package(ImportError("cannot import name 'x' from 'y'")) is None


@pytest.mark.parametrize(
    ("module", "hidden", "complaint"),
    [
        ("transformers", ["transformers"], "transformers is missing: pip install"),
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


def test_a_callback_without_accelerate() -> None:
    """It works, or says what is missing: no other error comes from within."""
    pytest.importorskip("transformers")
    module = "mimose.integrations.transformers"
    code = _HIDING.format(hidden=["accelerate"], module=module)

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )

    expected = "accelerate is missing: pip install 'mimose[transformers]'"
    assert done.returncode == 0 or expected in done.stderr.splitlines()[-1]
