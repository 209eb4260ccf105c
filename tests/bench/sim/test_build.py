"""Compiling the library, and saying why it cannot be compiled."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from benchmarks.sim import SimUnavailableError, build, why_not


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_CACHE", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_the_reason_is_told():
    """Tests skip with it; those who insist get it as an error."""
    expected = (
        "the simulated accelerator needs a C++ compiler, and there is no "
        "no-such-compiler"
    )

    assert expected == why_not()
    with pytest.raises(SimUnavailableError, match=re.escape(expected)):
        build.build()
