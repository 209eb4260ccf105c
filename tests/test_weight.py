"""What a session imports, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest

_TRAIN = """
import sys
import torch
from torch import nn

import mimose

model = nn.Sequential(
    *(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
)
# Any optimizer brings torch.compile, and that SymPy, with a session or without.
optimizer = torch.optim.SGD(model.parameters())
HEAVY = {"pandas", "scipy", "sklearn", "sympy", "transformers", "lightning"}

def heavy():
    return HEAVY & set(sys.modules)

at_first = heavy()
with mimose.attach(model, "+1GiB", planner=sys.argv[1]) as session:
    attached = heavy() - at_first
    for length in (8, 12, 16, 20, 24, 28, 10, 14, 18, 22, 26, 12, 12):
        model(torch.randn(2, length, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.report()
    session.load_state_dict(session.state_dict())
    assert session.summary().phases.get("plan"), session.report()
print(sorted(attached), sorted(heavy() - at_first))
"""


def _loaded_with(planner: str) -> str:
    """Return what attaching loads of the heavy packages, and what training adds up to.

    In a process of its own: this one has loaded them all.
    """
    done = subprocess.run(
        [sys.executable, "-c", _TRAIN, planner],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_session_imports_nothing_heavy() -> None:
    """Neither attaching nor planned training loads scikit-learn, SciPy or pandas."""
    assert "[] []" == _loaded_with("auto")
