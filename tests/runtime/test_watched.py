"""`Session.watch`: the loader's own batches, and plans before they come."""

import gc
import random
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mimose

WIDTH = 16
N_BATCHES = 90


def _lengths(n_batches=N_BATCHES):
    """Draw lengths up to 200; each teaches at first, and the largest come early."""
    draw = random.Random(4)
    return [200, 8, 150, 60] + [draw.randrange(8, 200) for _ in range(n_batches - 4)]


def _batch(n_rows):
    return torch.randn(n_rows, WIDTH, generator=torch.Generator().manual_seed(n_rows))


class _Batches(Dataset):
    def __len__(self):
        return N_BATCHES

    def __getitem__(self, index):
        """Make a batch in a worker."""
        return _batch(_lengths()[index])


def _train(toys, session, model, batches):
    for batch in session.watch(batches):
        toys.forward(model, batch).backward()
        model.zero_grad()


def _misses(session):
    """Return the steps behind those measured at first that found no plan."""
    return [r.step for r in list(session.records)[45:] if not r.cache_hit]


@pytest.mark.parametrize("kind", ["loader", "generator"])
def test_plans_are_there_before_their_batches(toys, kind):
    """Whatever the batches come from; without watching, new shapes have none."""
    model = toys.chain(4, WIDTH)
    batches = {
        "loader": lambda: DataLoader(_Batches(), batch_size=None, num_workers=2),
        "generator": lambda: map(_batch, _lengths()),
    }[kind]()
    with toys.counting() as meter, mimose.attach(model, "1TiB", meter=meter) as session:
        _train(toys, session, model, batches)
    assert N_BATCHES == len(session.records)
    assert [] == _misses(session)
    if kind == "loader":
        return
    with toys.counting() as meter, mimose.attach(model, "1TiB", meter=meter) as session:
        for n_rows in _lengths():
            toys.forward(model, _batch(n_rows)).backward()
            model.zero_grad()
    assert _misses(session) != []


def _n_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def _watched(batches, **options):
    session = mimose.attach(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), "1TiB", units=torch.nn.Linear
    )
    return session, session.watch(batches, **options)


def test_batches_are_the_very_same_in_their_order():
    """Of lists, also again and again; nothing is taken out of them."""
    batches = [torch.zeros(n, 2) for n in (3, 1, 2)]
    session, watched = _watched(batches)
    for _ in range(2):
        got = list(watched)
        assert all(one is other for one, other in zip(batches, got, strict=True))
    assert 3 == len(watched)
    session.detach()
    assert 3 == len(list(watched))


def test_an_iterator_is_taken_a_little_ahead():
    """No more than asked for; what a loop left behind comes first in the next."""
    taken = []

    def make():
        for n in range(1, 9):
            taken.append(n)
            yield torch.zeros(n, 2)

    session, watched = _watched(make(), ahead=3)
    for batch in watched:
        if len(batch) == 2:
            break
    assert [1, 2, 3, 4, 5] == taken
    assert [3, 4, 5, 6, 7, 8] == [len(batch) for batch in watched]
    with pytest.raises(TypeError):
        len(watched)
    session.detach()


def test_an_exception_comes_in_its_turn():
    """Batches that were taken before it come before it."""

    def make():
        yield torch.zeros(1, 2)
        yield torch.zeros(2, 2)
        msg = "of the loader"
        raise ArithmeticError(msg)

    session, watched = _watched(make())
    got = []
    with pytest.raises(ArithmeticError, match="of the loader"):
        for batch in watched:
            got.append(len(batch))
    assert [1, 2] == got
    session.detach()


@pytest.mark.parametrize("is_loader", [False, True])
def test_no_batch_is_kept_alive(is_loader):
    """A loop that lets its batch go has it gone; that of a list stays with the list."""
    made = (torch.zeros(n, 2) for n in range(1, 5))
    batches = DataLoader(_Batches(), batch_size=None) if is_loader else made
    session, watched = _watched(batches, ahead=0)
    for batch in watched:
        alive = weakref.ref(batch)
        del batch
        assert alive() is None
    session.detach()


def test_a_loader_stays_what_it_is():
    """Its attributes are at hand, it is watched once, and given back at the end."""
    loader = DataLoader(_Batches(), batch_size=None)
    collate = loader.collate_fn
    session, watched = _watched(loader)
    assert N_BATCHES == len(watched)
    assert watched.dataset is loader.dataset
    told = loader.collate_fn
    next(iter(session.watch(loader)))
    assert loader.collate_fn is told is not collate
    session.detach()
    assert loader.collate_fn is collate
    assert N_BATCHES == len(list(watched))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files unknown")
def test_a_loader_of_which_nothing_is_left_takes_its_pipe_along():
    """A loader made anew in each epoch leaves no open files behind."""
    session, _ = _watched([])
    gc.collect()
    before = _n_files()
    for _ in range(3):
        session.watch(DataLoader(_Batches(), batch_size=None))
        gc.collect()
        assert before == _n_files()
    loader = DataLoader(_Batches(), batch_size=None)
    session.watch(loader)
    assert before + 2 == _n_files()
    session.detach()
    assert before >= _n_files()
