"""`Session.watch`: the loader's own batches, and plans before they come."""

import random
import weakref

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


@pytest.mark.parametrize("is_loader", [True, False])
def test_plans_are_there_before_their_batches(toys, is_loader):
    """Whatever the batches come from; without watching, new shapes have none."""
    model = toys.chain(4, WIDTH)
    batches = [_batch(n) for n in _lengths()]
    if is_loader:
        batches = DataLoader(_Batches(), batch_size=None, num_workers=2)
    with toys.counting() as meter, mimose.attach(model, "1TiB", meter=meter) as session:
        _train(toys, session, model, batches)
    assert N_BATCHES == len(session.records)
    assert len(_misses(session)) < 8  # those measured after a prediction was off
    if is_loader:
        return
    with toys.counting() as meter, mimose.attach(model, "1TiB", meter=meter) as session:
        for batch in batches:
            toys.forward(model, batch).backward()
            model.zero_grad()
    assert len(_misses(session)) > 16


def _watched(batches):
    session = mimose.attach(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), "1TiB", layers=torch.nn.Linear
    )
    return session, session.watch(batches)


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


def test_what_might_draw_other_batches_is_not_read_ahead():
    """Iterators, loaders without workers, and what others made of loaders."""
    for batches in (iter([1]), DataLoader(_Batches()), {1: 2}.values()):
        session, watched = _watched(batches)
        assert watched is batches
        session.detach()


class _Failing(_Batches):
    def __getitem__(self, index):
        """Fail at the third."""
        if index == 2:
            msg = "of the loader"
            raise ArithmeticError(msg)
        return super().__getitem__(index)


def test_an_exception_comes_in_its_turn():
    """Batches that were taken before it come before it."""
    loader = DataLoader(_Failing(), batch_size=None, num_workers=1)
    session, watched = _watched(loader)
    assert N_BATCHES == len(watched)
    assert watched.dataset is loader.dataset
    got = []
    with pytest.raises(ArithmeticError, match="of the loader"):
        for batch in watched:
            got.append(len(batch))
    assert _lengths()[:2] == got
    session.detach()


def test_no_batch_is_kept_alive():
    """A loop that lets its batch go has it gone."""
    loader = DataLoader(_Batches(), batch_size=None, num_workers=1)
    session, watched = _watched(loader)
    for batch in watched:
        alive = weakref.ref(batch)
        del batch
        assert alive() is None
    session.detach()
