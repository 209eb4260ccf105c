"""What a loader's collate_fn tells, from this process and from workers."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mimose.inputs.batches import BatchShape
from mimose.inputs.collating import Line, WatchedLoaders, base_loaders, write

N_BATCHES = 6


class _Rows(Dataset):
    """Item i has i + 1 rows."""

    def __len__(self):
        return N_BATCHES

    def __getitem__(self, index):
        return torch.zeros(index + 1, 2)


def _sizes(watched):
    return sorted(shape.sizes[0] for shape in watched.line.read())


ALL = list(range(1, N_BATCHES + 1))


@pytest.mark.parametrize("start", [None, "spawn"])
def test_every_batch_is_told(start):
    """In this process, in forked workers and in those that start anew; each epoch."""
    options = {} if start is None else {"num_workers": 2}
    if start is not None:
        options.update(multiprocessing_context=start, persistent_workers=True)
    loader = DataLoader(_Rows(), batch_size=None, **options)
    collate = loader.collate_fn
    watched = WatchedLoaders(loader)
    for _ in range(2):
        assert ALL == [len(batch) for batch in loader]
        assert ALL == _sizes(watched)
    watched.remove()
    assert loader.collate_fn is collate
    assert ALL == [len(batch) for batch in loader]
    assert [] == watched.line.read()


def test_batches_are_told_before_they_are_asked_for():
    """The workers are ahead of the loop, which is what it is all for."""
    loader = DataLoader(_Rows(), batch_size=None, num_workers=1, prefetch_factor=4)
    watched = WatchedLoaders(loader)
    batches = iter(loader)
    next(batches)
    next(batches)  # of one worker in turn: what came before was collated before
    assert 2 <= len(watched.line.read())
    del batches
    watched.remove()


def test_a_full_pipe_and_long_lines_are_no_obstacle():
    """Whoever tells never waits; what does not fit is lost."""
    line = Line()
    shape = BatchShape("kind", (1, 2), ("mask",))
    for _ in range(10_000):
        write(line.for_worker(), shape)
    write(line.for_worker(), BatchShape("kind", (1,) * 10_000, None))
    told = line.read()
    assert {shape} == set(told)
    write(line.for_worker(), shape)
    assert [shape] == line.read()
    line.close()
    line.tell(shape)
    assert [] == line.read()


def test_one_who_stands_around_another_leaves_nothing():
    """Two sessions watch one loader, and end in either order."""
    for order in (1, -1):
        loader = DataLoader(_Rows(), batch_size=None)
        collate = loader.collate_fn
        both = [WatchedLoaders(loader), WatchedLoaders(loader)]
        list(loader)
        assert [ALL, ALL] == list(map(_sizes, both))
        for watched in both[::order]:
            watched.remove()
        assert loader.collate_fn is collate


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
def test_loaders_are_found_in_what_others_made_of_them():
    """accelerate's, Lightning's, and containers of loaders."""
    loader, other = (DataLoader(_Rows(), batch_size=None) for _ in range(2))
    assert [loader] == base_loaders(loader)
    assert [loader, other] == base_loaders({"a": loader, "b": [other, loader]})
    assert [] == base_loaders([torch.zeros(1)])
    accelerate = pytest.importorskip("accelerate.data_loader")
    shard = accelerate.prepare_data_loader(loader, put_on_device=False)
    assert [shard.base_dataloader] == base_loaders(shard)
    combined = pytest.importorskip("lightning.pytorch.utilities.combined_loader")
    assert [loader, other] == base_loaders(combined.CombinedLoader([loader, other]))
