"""Rows in a file."""

import pytest

from mimose.bench.csv_file import RowsFile, read, write
from mimose.bench.grid.rows import GridRow


def test_rows_come_back_as_they_were(tmp_path, grid):
    """Numbers, texts, and what is not known."""
    path = tmp_path / "deep" / "rows.csv"
    file = RowsFile(path, GridRow)
    file.append(grid[:3])
    file.append(grid[3:])
    file.close()
    assert read(path, GridRow) == grid


def test_another_file_is_refused(tmp_path):
    """With the columns it has."""
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has columns"):
        read(path, GridRow)


def test_a_line_cut_short_is_refused(tmp_path, grid):
    """As a process that is killed in writing leaves it."""
    path = tmp_path / "rows.csv"
    write(path, GridRow, grid)
    path.write_text(path.read_text()[:-90])
    with pytest.raises(ValueError, match="is cut short"):
        read(path, GridRow)
