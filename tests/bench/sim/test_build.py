"""Compiling the library, and saying why it cannot be compiled."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from benchmarks.sim import SimUnavailableError, build, why_not
from benchmarks.sim.build import library_path


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


@pytest.mark.usefixtures("_no_compiler")
def test_what_is_compiled_needs_no_compiler():
    """A library that is there is taken as it is."""
    library_path().parent.mkdir(parents=True)
    library_path().touch()

    assert "" == why_not()
    assert library_path() == build.build()


@pytest.mark.usefixtures("_no_compiler")
def test_a_compiler_that_fails_is_quoted(monkeypatch):
    """Its words are in the error, and no half of a library is left behind."""
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SimUnavailableError, match="false could not compile"):
        build.build()

    assert not library_path().exists()


def test_a_change_of_the_sources_is_another_library(monkeypatch, tmp_path):
    """The name holds a digest of all sources."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;", encoding="utf-8")
    monkeypatch.setattr(build, "_SOURCES", sources)
    before = library_path()
    (sources / "a.cpp").write_text("int b;", encoding="utf-8")

    assert before != library_path()
