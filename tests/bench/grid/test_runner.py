"""Running a grid, with processes that only say that they train."""

import pytest

pytest.importorskip("transformers")

from mimose.bench.grid.runner import GridSettings, WorkloadRun

_LENGTHS = tuple({"length": n} for n in (40, 30, 20, 30, 25, 40))


@pytest.fixture
def run(children):
    """Run a grid of tc-bert; return its rows by strategy."""

    def run(*strategies, **settings):
        grid = WorkloadRun(
            GridSettings(
                workloads=("tc-bert",),
                strategies=("none", *strategies),
                budgets=(0.5,),
                **{"steps": 5, "warm_up": 1, **settings},
            ),
            "tc-bert",
            lambda _: None,
        )
        grid.run()
        assert all(child.is_closed for child in children.made)
        return {
            name: [row for row in grid.rows if row.strategy == name]
            for name in ("none", *strategies)
        }

    return run


def test_flops_are_counted_where_a_strategy_does_not_tell_them(run, children):
    """Less plain training's, once for steps alike; nobody asks who tells its own."""
    rows = run("mimose", "hf-full", "mimose-paper", trace=_LENGTHS)
    lengths = [each["length"] for each in _LENGTHS]

    def flops(name):
        return [row.recomputed_flops for row in rows[name]]

    assert flops("none") == [0] * 6
    assert flops("mimose") == [5] * 6
    assert flops("hf-full") == [3 * length**2 for length in lengths]
    assert flops("mimose-paper") == [2 * length**2 for length in lengths]
    n_counted = {"none": 4, "mimose": 0, "hf-full": 4, "mimose-paper": 5}
    assert {name: len(children.of(name).counts) for name in n_counted} == n_counted
    assert {asked[2] for asked in children.of("mimose-paper").counts} == {"plan"}
