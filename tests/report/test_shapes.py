"""The runs of a file, and the sizes of each step, as reports and pages show them."""

from mimose.records import StepRecord, shapes_of


def _record(step, **shape):
    names = {name.replace("_", "."): size for name, size in shape.items()}
    return StepRecord(step, names, "plan", (), 1, 1, None)


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
