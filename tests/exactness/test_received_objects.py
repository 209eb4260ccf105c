"""Objects that layers are handed and change: the layers are kept."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import mimose

N_LAYERS = 4


class _Slot:
    """One layer's part of a cache."""

    def __init__(self):
        self.keys = None


class _Cache:
    """Keys by layer, as key-value caches keep them."""

    def __init__(self):
        self.slots = []
        self.seen = {"calls": 0}

    def update(self, keys, layer):
        while len(self.slots) <= layer:
            self.slots.append(_Slot())
        slot, self.seen["calls"] = self.slots[layer], self.seen["calls"] + 1
        parts = [keys] if slot.keys is None else [slot.keys, keys]
        slot.keys = torch.cat(parts, dim=1)
        return slot.keys


class _Layer(nn.Module):
    """Attends to what the cache holds of it; the cache is an argument."""

    def __init__(self, index, width=16):
        super().__init__()
        self.index = index
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, cache=None):
        keys = self.linear(x)
        if cache is not None:
            keys = cache.update(keys, self.index)
        scores = torch.tanh(x @ keys.transpose(1, 2))
        return x + self.dropout(scores @ keys)


class _Model(nn.Module):
    """Makes a cache in every forward, asked or not."""

    def __init__(self, makes=_Cache, layer=_Layer):
        super().__init__()
        self.makes = makes
        self.layers = nn.ModuleList(layer(i) for i in range(N_LAYERS))

    def forward(self, x, cache=None):
        cache = self.makes() if cache is None else cache
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x.square().mean()


def _model(*how, kind=_Model):
    torch.manual_seed(0)
    return kind(*how).train()


def _train(model, lengths, caches=None):
    """Train on a batch of each length; return losses and gradients."""
    torch.manual_seed(1)
    told = []
    for index, length in enumerate(lengths):
        cache = None if caches is None else caches[index]
        loss = model(torch.randn(2, length, 16), cache)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        told += [loss.detach(), *map(torch.clone, grads)]
        model.zero_grad()
    return told


def _same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("planner", ["full", "auto"])
def test_layers_that_append_to_a_cache_are_kept(toys, meter, planner):
    """Their first calls tell: no forward is run again, and all is equal."""
    model = _model()
    bare = _train(copy.deepcopy(model), (8, 12, 16, 8, 20, 9, 11, 8))
    with mimose.attach(model, "1TiB", planner=planner, meter=meter) as session:
        assert _same(bare, _train(model, (8, 12, 16, 8, 20, 9, 11, 8)))
        kept = session.summary().kept_units
    assert {f"layers.{i}" for i in range(N_LAYERS)} == set(kept)
    assert {"it changes an object that it receives"} == set(kept.values())
    assert 0 == session.summary().retries


class _Reader(_Layer):
    """Reads a number of the object, and changes nothing."""

    def forward(self, x, cache=None):
        return x + self.dropout(torch.tanh(self.linear(x))) * cache.value


def test_layers_that_only_read_an_object_are_recomputed(meter):
    """From the second call on; one that begins later to change it is kept then."""
    model = _model(_Scale, _Reader)
    bare = _train(copy.deepcopy(model), (8, 12, 8))
    with mimose.attach(model, "1TiB", planner="full", meter=meter) as session:
        assert _same(bare, _train(model, (8, 12, 8)))
        assert {} == session.summary().kept_units
        assert 0 < session.summary().recomputed_flops
        model.layers[1].dropout.register_forward_hook(
            lambda *_: setattr(caches[0], "value", caches[0].value * 0.5)
        )
        caches = [_Scale()]
        with pytest.raises(mimose.NotRecomputableError, match="run the step again"):
            _train(model, (8,), caches)


def test_a_cache_of_the_users_is_filled_once(meter):
    """What was in it counts in the recomputation; it ends as in the bare model."""
    model = _model()

    def filled():
        torch.manual_seed(5)
        cache = _Cache()
        for index in range(N_LAYERS):
            cache.update(torch.randn(2, 3, 16), index)
        return cache

    mine, others = [filled() for _ in range(2)], [filled() for _ in range(2)]
    bare = _train(copy.deepcopy(model), (8, 12), others)
    with mimose.attach(model, "1TiB", planner="full", meter=meter):
        assert _same(bare, _train(model, (8, 12), mine))
    for one, other in zip(mine, others, strict=True):
        assert one.seen == other.seen
        for a, b in zip(one.slots, other.slots, strict=True):
            assert torch.equal(a.keys, b.keys)


class _InPlace(_Cache):
    """Keeps its keys in one buffer, as static caches do."""

    def __init__(self):
        super().__init__()
        self.sums = [torch.zeros(()) for _ in range(N_LAYERS)]

    def update(self, keys, layer):
        self.sums[layer] += keys.detach().mean()
        return keys + self.sums[layer]


def test_a_layer_that_edits_an_objects_tensor_is_kept(meter):
    """It cannot be recomputed; it is named, and the step gives the same."""
    model = _model(_InPlace)
    bare = _train(copy.deepcopy(model), (8, 12))
    with mimose.attach(model, "1TiB", planner="full", meter=meter) as session:
        assert _same(bare, _train(model, (8, 12)))
    kept = session.summary().kept_units
    assert {f"layers.{i}" for i in range(N_LAYERS)} == set(kept)
    assert "an object that it receives" in next(iter(kept.values()))


def test_a_forward_that_has_filled_a_users_cache_is_not_run_again(meter):
    """It would fill it twice; the error comes through."""
    model = _model()
    model.layers[-1].register_forward_pre_hook(_fail)
    cache = _Cache()
    session = mimose.attach(model, "1TiB", planner="none", meter=meter)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(2, 8, 16), cache)
    assert N_LAYERS - 1 == cache.seen["calls"]
    assert 0 == session.records[-1].retries
    session.detach()


def _fail(*_):
    msg = "out of memory"
    raise torch.OutOfMemoryError(msg)


def test_nothing_outlives_the_step(meter):
    """No copy leads back to the layer's own graph: all goes without a collection."""
    model = _model()
    caches = []

    class _Seen(_Cache):
        def __init__(self):
            super().__init__()
            caches.append(weakref.ref(self))

    model.makes = _Seen
    gc.collect()
    gc.disable()
    try:
        with mimose.attach(model, "1TiB", planner="full", meter=meter):
            for length in (8, 12, 8):
                loss = model(torch.randn(2, length, 16))
                loss.backward()
                del loss
                model(torch.randn(2, length, 16))  # no backward follows
    finally:
        gc.enable()
    assert [None] * 6 == [ref() for ref in caches[:6]]


class _Scale:
    """Changed by the model, and read by its layers."""

    def __init__(self):
        self.value = 1.0


class _ScaledModel(_Model):
    def forward(self, x, cache=None):
        cache = self.makes()
        for layer in self.layers:
            x = layer(x, cache)
            cache.value *= 0.5
        return x.square().mean()


def test_what_changes_behind_a_layers_back_is_found(meter):
    """No layer changes it: it differs as the forward ends, which is run again."""
    model = _model(_Scale, _Reader, kind=_ScaledModel)
    bare = _train(copy.deepcopy(model), (8, 12, 8))
    with mimose.attach(model, "1TiB", planner="full", meter=meter) as session:
        assert _same(bare, _train(model, (8, 12, 8)))
    assert N_LAYERS == len(session.summary().kept_units)
