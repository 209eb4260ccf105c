"""The field's words in docs, docstrings, comments and messages, and none of the old."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"told|foretold|foretells?|tells? of|telling": "say, report, predict, distinguish",
    r"lets? go|letting go|handed|hands over": "free, drop, pass",
    r"facts|takes? note|taking note": "input shape, signature; record",
    r"gives? back|given back|gave back|giving back": "free, restore, return",
    r"doubts?|hopes?|beforehand": "uncertainty, margin; before, ahead",
    r"said once|as (it|they) comes?": "one line in the log; unchanged",
    r"makes? room|nobody|somebody|anybody": "free memory; no code, the user",
    r"heeds?|takes? over (what|all|the|another)": "keep; load, replace",
    r"(of|on) (its|their) own": "its, own, separate, by itself",
    r"(a|the|each|every) units?|kinds? of inputs?": "layer; signature",
    r"lean\d*|packing|stash(es|ed)?|lanes?|daemons?": "selective, compress, worker",
    r"excess|excesses|footprints?": "transient peak; allocated, reserved memory",
    r"meetings?|late answers?": "rendezvous; deferred device check",
}
"""Old words, and what to say instead."""
OLD = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)
ALLOWED = re.compile(
    r"proofs packing|\"packing\"|"
    r"(without a|the|a) unit\b(?= is| that| of | more|\.|\"|$)"
)
"""What is old on purpose, and units of measurement."""
DONE = ("README.md", "docs", "mimose", "planners", "predictors", "benchmarks")
"""Pages and packages where all files are read."""


def _lines(path):
    """Yield numbered lines that people read: a page's, or comments and strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            text = re.sub(r"\{[^{}]*\}", "", token.string)  # code in an f-string
            yield from enumerate(text.splitlines(), token.start[0])


@pytest.mark.parametrize("name", DONE)
def test_old_words_are_gone(name):
    """A line with an old word is listed, with the words to choose from."""
    path = ROOT / name
    pattern = "*.md" if name == "docs" else "**/*.py"
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in _lines(file)
        if OLD.search(ALLOWED.sub("", line))
    ]
    assert [] == found, INSTEAD
