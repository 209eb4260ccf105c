"""What rows come to: numbers, words and a picture."""

import dataclasses

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")


from mimose.bench.grid.picture import draw_grid
from mimose.bench.grid.summary import summarise


def test_the_picture_has_the_published_figures_beside_ours(grid, tmp_path):
    """Where the paper has them; whatever the workload is."""
    pytest.importorskip("matplotlib")
    for name in ("tc-bert", "mine:make"):
        rows = [dataclasses.replace(row, workload=name) for row in grid]
        draw_grid(summarise(rows), tmp_path / "bench.svg")
        text = (tmp_path / "bench.svg").read_text()
        assert ("as the paper reports" in text) == (name == "tc-bert")
        assert name in text
