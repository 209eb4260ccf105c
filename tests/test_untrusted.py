"""Files are data: whatever is in a state or in records, nothing else is done than said.

``MIMOSE_EXAMPLES=20000 python -m pytest tests/test_untrusted.py`` tries so many files.
"""

from __future__ import annotations

import copy
import html.parser
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("torch")

from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st

import mimose
from mimose.cli.main import main
from mimose.exceptions import StateMismatchError
from mimose.records import StepRecord
from mimose.state import sealed

_HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(1)'>&\""
fuzzed = examples(25)
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 10**400, 1e308, -1e308, 0.5]),
    st.floats(),
)
VALUES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "text", "0", _HOSTILE])
)
JSON = st.recursive(
    VALUES,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(st.text(max_size=3), inside, max_size=3)
    ),
    max_leaves=6,
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 2**32), st.sampled_from("=-+*~"), JSON),
    min_size=1,
    max_size=3,
)


def _changed(value: Any, changes: Any) -> Any:
    """Change some places of a tree: other values, fewer, more, many more, twice."""
    root = [copy.deepcopy(value)]
    for seed, kind, other in changes:
        draw, parent, at = random.Random(seed), root, 0
        while (
            isinstance(parent[at], (dict, list)) and parent[at] and draw.random() < 0.85
        ):
            parent = parent[at]
            at = draw.choice(
                list(parent) if isinstance(parent, dict) else range(len(parent))
            )
        here = parent[at]
        if kind == "=":
            parent[at] = other
        elif kind == "-":
            del parent[at]
            if not root:
                root = [other]
        elif kind == "+" and isinstance(here, list):
            here.append(other)
        elif kind == "*" and isinstance(here, list):
            parent[at] = here * 50
        elif kind == "~" and isinstance(here, (int, float)):
            parent[at] = -here * 1000
    return root[0]


@pytest.fixture(scope="module")
def learned(toys: Any) -> Any:
    """A model, its batches, a meter that reads nothing, and what a session learned."""
    meter, model = toys.BlindMeter(), toys.chain(3)
    batches = [toys.inputs(rows) for rows in (8, 24, 16, 32, 12, 20, 8, 28)]
    with mimose.attach(model, "1GiB", meter=meter) as session:
        toys.train(model, batches)
        state = json.loads(json.dumps(session.state_dict()))
    return state, meter


@pytest.mark.parametrize("is_sealed", [False, True])
def test_any_state(toys: Any, learned: Any, is_sealed: bool) -> None:
    """It is refused, and nothing has changed; steps are right all the same.

    One that somebody has made by hand, digest and all, may be taken, and a step may
    fail with an error of its own: nothing else is done, and no gradient is another.
    """
    state, meter = learned
    most = 20 * len(json.dumps(state))
    bare = toys.train(toys.chain(3), [toys.inputs(8), toys.inputs(40)])

    @fuzzed
    @given(changes=CHANGES)
    def look(changes: Any) -> None:
        model, other = toys.chain(3), _changed(state, changes)
        if is_sealed and isinstance(other, dict):
            other.pop("digest", None)
            other = sealed({**other, "of": state["of"]})
        with mimose.attach(model, "1GiB", meter=meter) as session:
            before = session.state_dict()
            try:
                session.load_state_dict(other)
            except StateMismatchError:
                is_taken = False
                assert json.dumps(before) == json.dumps(session.state_dict())
            else:
                is_taken = True
                assert len(json.dumps(session.state_dict())) <= most
            try:
                planned = toys.train(model, [toys.inputs(8), toys.inputs(40)])
            except Exception:
                assert is_sealed and is_taken
                return
            assert session.report()
        assert [] == toys.differences(bare, planned)

    look()


_RECORD = asdict(
    StepRecord(
        step=3,
        shape={"ids.1": 12, "ids.0": 2},
        phase="plan",
        actions=("keep", "recompute"),
        budget_bytes=1000,
        start_bytes=100,
        predicted_peak_bytes=350.0,
        observed_peak_bytes=340,
        events=("a#0", "b#0"),
        seconds=0.1,
        reason="text",
    )
)


class _Tags(html.parser.HTMLParser):
    """Notes the tags of a page, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Note a tag, and attributes that run something."""
        self.found.append(tag)
        self.found += [name for name, _ in attrs if name.startswith("on")]


def test_any_records(tmp_path: Path, capsys: Any) -> None:
    """They are refused in words, or read; the page shows texts as texts."""
    path, shown = tmp_path / "records.jsonl", tmp_path / "page.html"
    path.write_text(json.dumps(_RECORD) + "\n", encoding="utf-8")
    assert main(["report", str(path), "--out", str(shown)]) == 0
    expected = _tags(shown)

    @fuzzed
    @given(lines=st.lists(st.one_of(CHANGES, st.binary(max_size=20)), max_size=3))
    def look(lines: Any) -> None:
        with path.open("wb") as file:
            for line in [[], *lines]:
                if not isinstance(line, bytes):
                    line = json.dumps(_changed(_RECORD, line)).encode()
                file.write(line + b"\n")
        code = main(["report", str(path), "--out", str(shown)])
        assert code in (0, 1, 2)
        said = capsys.readouterr()
        assert code < 2 or said.err.startswith("mimose report: ")
        assert "Traceback" not in said.err
        if code < 2:
            assert shown.stat().st_size < 300_000
            assert _tags(shown) == expected

    look()


def _tags(path: Path) -> list[str]:
    tags = _Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    return tags.found
