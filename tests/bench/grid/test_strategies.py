"""What strategies share."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from mimose.bench.grid.strategies import found_once


def test_it_is_found_once(tmp_path):
    """By whoever comes first, while the others wait; then they are told."""
    setup = SimpleNamespace(shared=tmp_path)
    asked, answers = [], []

    def find(known):
        asked.append(dict(known))
        return known or {"growth": 5}

    def ask():
        answers.append(found_once(setup, "it", find))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{"growth": 5}] * 4
    assert asked == [{}] + [{"growth": 5}] * 3


def test_what_failed_is_looked_for_again(tmp_path):
    """Nothing is left behind of it, and nobody waits for ever."""
    setup = SimpleNamespace(shared=tmp_path)
    with pytest.raises(ZeroDivisionError):
        found_once(setup, "it", lambda _: {"growth": 1 / 0})
    assert found_once(setup, "it", lambda known: {**known, "is_new": True}) == {
        "is_new": True
    }
