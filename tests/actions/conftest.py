"""What tests of `selective` share."""

import pytest

from mimose.actions import selective


@pytest.fixture
def freed(monkeypatch):
    """The bytes that each call let go."""
    found, drop = [], selective.drop

    def noted(*args):
        dropped = drop(*args)
        found.append(dropped)
        return dropped

    monkeypatch.setattr(selective, "drop", noted)
    return found


@pytest.fixture
def always_selective(toys):
    """Options of a session that runs everything under `selective`."""
    action = "selective_all"
    return {"budget": "1TiB", "actions": [action], "planner": toys.everywhere(action)}
