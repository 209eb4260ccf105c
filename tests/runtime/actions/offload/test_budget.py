"""The budget of host memory: what may be given, and what is taken where nothing is."""

import pytest
import torch

import mimose
from mimose.actions.offload import budget
from mimose.actions.offload.budget import (
    free_bytes,
    make_host,
    parse_host_budget,
)
from mimose.exceptions import BudgetError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path):
    """The limit less what is used; no limit is written as a word."""
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(budget, "_CGROUPS", ((str(limit), str(used)),))
    monkeypatch.setattr(budget, "_available", lambda: 8 * GIB)
    used.write_text(f"{GIB}\n")
    for text, expected in (("max\n", 8 * GIB), (f"{4 * GIB}\n", 3 * GIB), ("1\n", 0)):
        limit.write_text(text)
        assert expected == free_bytes()


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 4 * GIB), (0.25, 2 * GIB), ("75%", 6 * GIB), ("16GiB", 16 * GIB)],
)
def test_sizes_and_shares(given, expected):
    """Shares are of what is free; half of it where nothing is given."""
    assert expected == parse_host_budget(given, 8 * GIB)


@pytest.mark.parametrize(
    ("given", "free", "match"),
    [
        (None, None, "does not tell how much memory is free; give bytes"),
        (0.5, None, "host_budget.*does not tell"),
        ("+1GiB", 8 * GIB, "host_budget.*relative"),
        (0, 8 * GIB, "host_budget.*at least 1"),
        ("lots", 8 * GIB, "host_budget.*'lots' is not a size"),
    ],
)
def test_what_is_no_budget(given, free, match):
    """The error says whose budget it is and what to give."""
    with pytest.raises(BudgetError, match=match):
        parse_host_budget(given, free)


def test_more_than_the_machine_has():
    """No memory of the host's is that large; all of it is a budget."""
    assert 16 * GIB == parse_host_budget("16GiB", 8 * GIB, 16 * GIB)
    told = r"host_budget '17GiB' is 17.00 GiB, and the host has 16.00 GiB, 8.00 GiB of"
    with pytest.raises(BudgetError, match=told):
        parse_host_budget("17GiB", 8 * GIB, 16 * GIB)
    with pytest.raises(BudgetError, match="and the host has"):
        make_host(CUDA, "1000TiB")


def test_a_model_on_the_host(toys):
    """It has nowhere to send anything: not by name, and not with a budget."""
    model = toys.chain(2)
    assert make_host(CPU, None) is None
    with pytest.raises(ValueError, match="'offload'"):
        mimose.attach(model, "1TiB", actions=("keep", "offload", "recompute"))
    with pytest.raises(BudgetError, match="on the host itself"):
        mimose.attach(model, "1TiB", actions="all", host_budget="1GiB")
    with mimose.attach(model, "1TiB", actions="all") as session:
        assert session.summary().host is None
