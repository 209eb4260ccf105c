"""The proof of what the library itself holds."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import weight
from benchmarks.proofs.common import Settings
from benchmarks.proofs.numbers import MIB
from mimose.usage import UsageError


def _row(has_session: bool, mebibytes: float, **changes: Any) -> weight.WeightRow:
    fields = {
        "model": "bert",
        "has_session": has_session,
        "repeat": 0,
        "at": "attach",
        "added_bytes": int(mebibytes * MIB),
        "loaded": "",
        **changes,
    }
    return weight.WeightRow(**fields, **Settings().provenance())


@pytest.mark.parametrize(("with_mib", "holds"), [(31.0, True), (32.0, False)])
def test_the_bar_is_about_what_a_session_adds(with_mib: float, holds: bool) -> None:
    """What the process takes without one, 1 MiB here, does not count."""
    rows = [_row(False, 1.0), _row(True, with_mib)]
    rows += [_row(has, 500.0 * has, at="step 1") for has in (False, True)]

    (bar,) = weight._judge(weight._summarise(rows))

    assert holds == bar.holds
    assert "bert" in bar.what


def test_repeats_count_by_their_median() -> None:
    """One odd reading decides nothing; what was loaded is told."""
    rows = [_row(False, 0.0), *(_row(True, n, loaded="scipy") for n in (3, 4, 90))]

    (line,) = weight._summarise(rows)

    assert (4.0, "scipy") == (line["with MiB"], line["loaded"])


def test_unknown_models_are_refused() -> None:
    """The zoo's models are not this proof's."""
    with pytest.raises(UsageError, match="choose among bert, blocks"):
        weight.ask(Settings(models=("gpt2",)), argparse.Namespace(repeats=1))
