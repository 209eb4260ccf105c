"""The proof of codecs: what it compares, and what it judges."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import unbiased
from benchmarks.proofs.common import Settings


@pytest.fixture(scope="module")
def rows() -> list[unbiased.UnbiasedRow]:
    """All of two cases, averaged over four draws."""
    said = [
        each
        for model in ("convolution", "network")
        for each in unbiased.work({"model": model, "seed": 0, "draws": 4})
    ]
    return [unbiased.UnbiasedRow(**each, **Settings().provenance()) for each in said]


def test_each_codec_is_compared_with_the_bare_call(
    rows: list[unbiased.UnbiasedRow],
) -> None:
    """Bits are exact; means leave the input's gradient; rounding is off by little."""
    for row in rows:
        is_off = row.weight_error > 0
        assert is_off is (row.codec != "bits")
        if not row.codec.startswith("quantize"):
            assert (1, 0.0) == (row.draws, row.input_error)
    network = {row.codec: row for row in rows if row.model == "network"}
    smaller = {
        codec: row.saved_bytes / row.packed_bytes for codec, row in network.items()
    }
    assert 1.5 < smaller["bits"] < smaller["pool"] < smaller["pool4"]
    assert smaller["pool4"] < smaller["quantize"] < smaller["quantize4"]


def test_what_is_judged(rows: list[unbiased.UnbiasedRow]) -> None:
    """The slope of what falls, and that nothing else is off."""
    own = [row for row in rows if (row.model, row.codec) == ("convolution", "quantize")]
    assert [1, 4] == [row.draws for row in own]
    assert [True] == [bar.holds for bar in unbiased.judge(own)]
    biased = [own[0], dataclasses.replace(own[1], weight_error=0.006)]
    assert not next(iter(unbiased.judge(biased))).holds
    assert not next(iter(unbiased.judge(own[:1]))).holds
