"""The programs under docs/examples run, plan, and stay within their budgets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
_NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
_PACKAGES = (
    *("transformers", "accelerate", "tokenizers", "datasets"),
    *("trl", "sentence_transformers", "matplotlib"),
)

pytestmark = pytest.mark.skipif(not _NAMES, reason="runs in a checkout")


def _needs(code: str) -> None:
    if "corpus" in code:
        pytest.importorskip("tokenizers")
    for name in _PACKAGES:
        if re.search(rf"^from {name}[. ]", code, re.MULTILINE):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pytest.importorskip(name, reason=f"needs {name}")


# A process of one's own, as a user's: what other tests left in this process's heap
# is part of its resident memory, and a budget that an example probed would not hold.
_RUN = """
import json, runpy, sys
session = runpy.run_path(sys.argv[1])["session"]
summary = session.summary()
planned = [record for record in session.records if record.phase == "plan"]
print()
print(json.dumps({
    "report": session.report(),
    "steps": summary.steps,
    "over": summary.steps_over,
    "planned": summary.phases["plan"],
    "keeps": any("keep" in record.actions for record in planned),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _NAMES)
def test_example_runs(name: str) -> None:
    """Steps are recorded, some of them planned, and none is over the budget."""
    path = EXAMPLES / f"{name}.py"
    code = path.read_text(encoding="utf-8")
    _needs(code)

    ran = subprocess.run(
        [sys.executable, "-c", _RUN, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    if "Trainer" not in code:  # trainers warn of settings that save time here
        assert "Warning" not in ran.stderr
    *printed, last = ran.stdout.splitlines()
    left = json.loads(last)

    assert left["steps"] >= 20
    assert left["over"] == 0
    assert left["planned"] > 0
    assert left["keeps"]
    assert left["report"] in "\n".join(printed)
