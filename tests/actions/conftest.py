"""What tests of `selective` share."""

import pytest

from mimose.actions import selective


@pytest.fixture
def freed(monkeypatch):
    """The bytes that each call let go."""
    found, let_go = [], selective.drop

    def noted(*args):
        found.append(let_go(*args))
        return found[-1]

    monkeypatch.setattr(selective, "drop", noted)
    return found


@pytest.fixture
def always_selective(toys):
    """Options of a session that runs everything under `selective`."""
    actions = ("keep", "selective", "recompute")
    return {"budget": "1TiB", "actions": actions, "planner": toys.Always("selective")}
