"""Rows in a file."""

import csv

import pytest

from mimose.bench.grid.runner import GridRow
from mimose.bench.rows import RowsFile, read, write


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


def test_where_it_was_measured_comes_last(tmp_path, grid):
    """Every field is a column."""
    path = tmp_path / "rows.csv"
    write(path, GridRow, grid)
    header = path.read_text().splitlines()[0].split(",")
    assert header[:2] == ["workload", "scale"]
    assert header[-9:-4] == ["seed", "threads", "load_average", "date", "device"]
    assert len(header) == len(GridRow.__dataclass_fields__)


def test_columns_in_another_order_and_newer_ones(tmp_path, grid):
    """What has come since takes its default."""
    path = tmp_path / "rows.csv"
    write(path, GridRow, grid)
    with path.open(newline="") as file:
        lines = [dict(reversed(line.items())) for line in csv.DictReader(file)]
    for line in lines:
        del line["is_limited"], line["accuracy"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    assert read(path, GridRow) == grid
