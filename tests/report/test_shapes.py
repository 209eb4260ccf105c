"""The runs of a file, and the sizes of each step, as reports and pages show them."""

import pytest

from mimose.records import StepRecord
from mimose.report.shapes import formula, n_elements, shapes_of, split_runs


def _record(step, **shape):
    names = {name.replace("_", "."): size for name, size in shape.items()}
    return StepRecord(step, names, "plan", (), 1, 1, None)


def test_runs_are_parted_where_a_step_comes_again():
    """Steps that ended out of order are still of one run."""
    runs = split_runs([_record(step) for step in [0, 2, 1, 3, 0, 1, 0]])
    assert [[0, 2, 1, 3], [0, 1], [0]] == [[r.step for r in run] for run in runs]


def test_what_was_not_named_was_as_in_the_first():
    """Later records name what varied; a size that never did is left out."""
    run = [_record(0, ids_0=4, ids_1=9), _record(1, ids_1=12), _record(2, ids_1=9)]
    assert [(("ids.1", n),) for n in (9, 12, 9)] == shapes_of(run)


def test_no_size_that_a_record_has_is_left_out():
    """Batches with labels and without come by turns, and the last has none."""
    run = [
        _record(0, ids_1=9, labels_1=700),
        _record(1, ids_1=9),
        _record(2, ids_1=12, labels_1=1700),
        _record(3, ids_1=12),
    ]
    shapes = shapes_of(run)
    assert [("labels.1", 700), ("labels.1", 1700)] == [shapes[0][1], shapes[2][1]]
    assert (("ids.1", 12),) == shapes[3][:1]


def test_kinds_of_inputs_stay_apart():
    """Each has names of its own, and its own first record, which names all."""
    run = [_record(0, x_0=2, x_1=8), _record(1, x_1=9), _record(2, y_0=2, y_1=8)]
    run += [_record(3, y_1=9), _record(4, x_0=3, x_1=9)]
    x, y = ((2, 8), (2, 9), (3, 9)), ((8,), (9,))
    found = [tuple(size for _, size in shape) for shape in shapes_of(run)]
    assert [x[0], x[1], y[0], y[1], x[2]] == found


@pytest.mark.parametrize(
    ("shape", "written", "size"),
    [
        ({"ids.1": 30}, "ids.1", 30),
        ({"x.0": 2, "x.2": 8, "x.3": 9}, "x.0 × x.2 × x.3", 144),
        ({"a.0": 2, "a.1": 5, "b.1": 7}, "a.0 × (a.1 + b.1)", 24),
        ({"a.0": 2, "a.1": 5, "b.0": 3}, "a.0 × a.1 + b.0", 13),
        ({"a.0": 6}, "a.0", 6),
        ({}, "1", 1),
    ],
)
def test_size_of_a_batch(shape, written, size):
    """It is the number of elements, as far as it varies, and says how it is made."""
    assert written == formula(tuple(shape))
    assert size == n_elements(tuple(shape.items()))
