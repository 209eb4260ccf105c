"""What a misspelt name was meant to be."""

from __future__ import annotations

import pytest

from mimose.near_names import near_names

NAMES = (
    "",
    "bert",
    "bert.embeddings",
    "bert.embeddings.dropout",
    "bert.encoder",
    "bert.encoder.layer",
    "bert.encoder.layer.0",
    "bert.encoder.layer.0.output",
    "bert.encoder.layer.1",
    "bert.encoder.layer.1.output",
    "bert.pooler",
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert.encoder.layers", ["bert.encoder.layer"]),
        ("Encoder.Layer", ["bert.encoder.layer"]),
        ("layr", ["bert.encoder.layer"]),
        ("encoder.layer.1", ["bert.encoder.layer.1"]),
        ("encoder.layer.2", []),
        ("embedings", ["bert.embeddings"]),
        ("output", ["bert.encoder.layer.0.output", "bert.encoder.layer.1.output"]),
        ("bert.encoder.cell", []),
        ("transformer.bert.encoder.layer", []),
        ("", []),
    ],
)
def test_near_names(name: str, expected: list[str]) -> None:
    """A letter or two apart, or the end of a name; nothing where nothing is near."""
    assert expected == near_names(name, NAMES)
