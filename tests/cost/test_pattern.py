"""Which calls run in a context, and how their sizes follow from the batch's."""

from mimose.cost.pattern import LayerCall, Pattern


def _calls(text):
    """Turn ``"a0 b0 a1"`` into calls of the layers a and b."""
    return tuple(
        LayerCall(f"{word[0]}#{word[1:]}", ord(word[0]) - ord("a"), int(word[1:]), "f")
        for word in text.split()
    )


def _called(counts):
    """Return the pattern of one layer that was called so often, by a root size."""
    most = max(n for _, n in counts)
    pattern = Pattern(_calls(" ".join(f"a{i}" for i in range(most))), counts=(most,))
    for size, n in counts:
        own = (*(((9,),) * n), *(((),) * (most - n)))
        pattern = pattern.taken_in((7, size), own, (n,))
    return pattern


def test_calls_follow_from_a_size_of_the_batch_or_are_the_most_seen():
    """One plan is for three images, another for two; where sizes do not tell, for all.

    A step in which more ran than that refutes the rule.
    """
    images = _called([(1, 1), (2, 2), (3, 3)])
    assert [1, 2, 3] == [len(images.expected((7, n)).calls) for n in (1, 2, 3)]
    assert not images.may_vary
    assert images.lacks_some((7, 4))
    drawn = _called([(8, 1), (16, 3), (24, 1)])
    assert {3} == {len(drawn.expected((7, n)).calls) for n in (8, 16)}
    assert drawn.may_vary
    refuted = images.missing((3,))
    assert 3 == len(refuted.expected((7, 1)).calls)
    assert not refuted.is_short
    more = images.missing((4,))
    assert more.lacks_some((7, 1))
    assert not more.taken_in((7, 1), ((9,), (), ()), (1,)).lacks_some((7, 1))
