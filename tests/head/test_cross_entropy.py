"""The loss by rows: torch's own to the last bit, and plain where it cannot be."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import mimose
from mimose.head import cross_entropy as by_rows
from mimose.head import edits, rows
from mimose.measure.tracker import StorageTracker
from mimose.tensors import sum_of_words

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LABELS = ("all count", "some ignored", "all ignored", "zero ignored")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small logits go by rows too, in many chunks."""
    monkeypatch.setattr(by_rows, "LEAST_BYTES", 0)
    monkeypatch.setitem(rows._CHUNK_BYTES, "cpu", 4096)


def made(n_rows, n_classes, dtype, kind="some ignored"):
    """Return logits that need a gradient, labels, and the ignored class."""
    generator = torch.Generator().manual_seed(n_rows * n_classes)
    logits = 3 * torch.randn(n_rows, n_classes, generator=generator)
    labels = torch.randint(0, n_classes, (n_rows,), generator=generator)
    ignored = 0 if kind == "zero ignored" else -100
    if kind in ("some ignored", "zero ignored"):
        labels[::5] = ignored
    if kind == "all ignored":
        labels[:] = ignored
    return logits.to(dtype).requires_grad_(), labels, {"ignore_index": ignored}


def trained(loss_of, logits, *, cast=None):
    """Return the loss and the logits' gradient for a gradient that is not 1."""
    logits = logits.detach().requires_grad_()
    whole = logits * 1.0 if cast is None else (logits * 1.0).to(cast)
    loss = loss_of(whole)
    del whole
    loss.backward(torch.full_like(loss, 0.37))
    return loss.detach(), logits.grad


def equal(expected, actual):
    """Whether all bits are the same, those of NaN included."""
    return all(
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(expected, actual, strict=True)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_plain_one(dtype, kind, reduction):
    """Loss and gradient, for rows that fill a vector and others."""
    for n_rows, n_classes in ((1, 7), (33, 1000), (130, 1023)):
        logits, labels, options = made(n_rows, n_classes, dtype, kind)
        options.update(target=labels, reduction=reduction)
        plain, own = (
            trained(functools.partial(f, **options), logits)
            for f in (F.cross_entropy, mimose.cross_entropy)
        )
        assert equal(plain, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_it_casts_by_rows(dtype, n_threads):
    """A cast to float32 before is part of it, with any number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        logits, labels, _ = made(64, 5003, dtype)
        plain = trained(lambda x: F.cross_entropy(x.float(), labels), logits)
        own = trained(
            lambda x: mimose.cross_entropy(x, labels, cast=torch.float32), logits
        )
    finally:
        torch.set_num_threads(before)
    assert equal(plain, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype):
    """Under autocast the loss has the precision that the plain one has there."""
    logits, labels, _ = made(33, 1000, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        plain, own = (
            trained(lambda x, f=f: f(x, labels), logits)
            for f in (F.cross_entropy, mimose.cross_entropy)
        )
    assert equal(plain, own)


@pytest.mark.parametrize(
    "options",
    [
        {"weight": torch.rand(50)},
        {"label_smoothing": 0.1},
        {"size_average": False},
        {"target": torch.rand(12, 50).softmax(1)},
        {"input": torch.rand(12, 50, 4), "target": torch.zeros(12, 4).long()},
        {"input": torch.rand(50), "target": torch.tensor(3)},
        {"cast": torch.float16},
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_what_rows_do_not_give_is_left_to_the_plain_one(options, monkeypatch):
    """Other losses are torch's own, and nothing is tried on them."""
    monkeypatch.setattr(by_rows._ByRows, "apply", None)
    given = {"input": torch.rand(12, 50), "target": torch.arange(12), **options}
    cast = given.pop("cast", None)
    own = mimose.cross_entropy(**given, cast=cast)
    if cast is not None:
        given["input"] = given["input"].to(cast)
    assert torch.equal(F.cross_entropy(**given), own)


def test_small_logits_are_left_to_the_plain_one(monkeypatch):
    """Below a MiB the plain function does the work."""
    monkeypatch.undo()
    monkeypatch.setattr(by_rows._ByRows, "apply", None)
    logits, labels, _ = made(8, 1000, torch.float32)
    assert torch.equal(
        F.cross_entropy(logits, labels), mimose.cross_entropy(logits, labels)
    )


@pytest.mark.parametrize("label", [50, -1])
def test_labels_that_are_no_classes(label):
    """The error is the plain function's."""
    labels = torch.full((12,), label)
    with pytest.raises(IndexError, match="out of bounds"):
        mimose.cross_entropy(torch.rand(12, 50), labels)


def test_double_backward():
    """A gradient of the gradient is the plain one's."""
    found = []
    for function in (F.cross_entropy, mimose.cross_entropy):
        logits, labels, _ = made(33, 200, torch.float64)
        loss = function(logits * 2.0, labels)
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits)
        found.append((first.detach(), second))
    assert equal(*found)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_loss_that_was_differentiated_with_a_graph_is_refused(is_alone):
    """In a sum with its gradient it would round otherwise; alone nobody can tell."""
    logits, labels, _ = made(33, 200, torch.float32)
    loss = mimose.cross_entropy(logits * 2.0, labels)
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    total = loss if is_alone else loss + first.square().sum()
    with pytest.raises(mimose.MimoseError, match="a second time after create_graph"):
        total.backward()


def test_transforms():
    """`torch.func` goes through it."""
    logits, labels, _ = made(9, 30, torch.float32)
    plain, own = (
        torch.func.grad(lambda x, f=f: f(x, labels))(logits.detach())
        for f in (F.cross_entropy, mimose.cross_entropy)
    )
    assert torch.equal(plain, own)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_forward_mode():
    """So does forward-mode differentiation."""
    logits, labels, _ = made(9, 30, torch.float32)
    found = []
    for function in (F.cross_entropy, mimose.cross_entropy):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(
                logits.detach(), torch.ones_like(logits)
            )
            found.append(torch.autograd.forward_ad.unpack_dual(function(dual, labels)))
    assert equal(*found)


def test_without_gradients():
    """Evaluation, and inference mode, give the same loss."""
    logits, labels, _ = made(33, 200, torch.float32)
    expected = F.cross_entropy(logits, labels)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(expected, mimose.cross_entropy(logits, labels))


def _shuffled(array):
    array[:] = array[:, ::-1].copy()


EDITS = {
    "a tensor": lambda whole: whole.mul_(2.0),
    "one element": lambda whole: whole.data[7, 11:12].add_(1.0),
    "data": lambda whole: whole.data.mul_(2.0),
    "a column": lambda whole: whole.detach().numpy()[:, 3:4].fill(0),
    "an array": lambda whole: _shuffled(whole.detach().numpy()),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("keeps", ["nothing", "graph", "create"])
@pytest.mark.parametrize("n_classes", [200, 203])
def test_an_edit_is_an_error(edit, keeps, n_classes):
    """Logits that were edited after the loss give no gradients, counted or not."""
    logits, labels, _ = made(33, n_classes, torch.float32)
    whole = logits * 1.0
    loss = mimose.cross_entropy(whole, labels)
    EDITS[edit](whole)
    del whole
    options = {"graph": {"retain_graph": True}, "create": {"create_graph": True}}
    with pytest.raises(mimose.RecomputationError, match="were edited between a loss"):
        loss.backward(**options.get(keeps, {}))
    assert logits.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_do_not_depend_on_the_place(dtype):
    """Hooks may bring logits back elsewhere, with other strides: they are the same."""
    whole = torch.randn(9, 14).to(dtype)
    moved = torch.empty(127, dtype=dtype)[1:].view(9, 14).copy_(whole)
    turned = whole.t().contiguous().t()
    words = {int(sum_of_words(each)) for each in (whole, moved, turned)}
    assert 1 == len(words)
    turned[3, 5] += 1
    assert int(sum_of_words(turned)) not in words


def test_an_edit_on_an_accelerator_is_told_at_the_end(monkeypatch):
    """No answer is waited for before the backward has ended, and then it fails."""
    logits, labels, _ = made(33, 200, torch.float32)
    different_bits = edits.different_bits
    monkeypatch.setattr(
        edits, "different_bits", lambda *two: torch.tensor(different_bits(*two))
    )
    monkeypatch.setattr(edits, "_is_recorded", lambda _: False)
    for is_edited in (False, True):
        whole = logits * 1.0
        loss = mimose.cross_entropy(whole, labels)
        if not is_edited:
            loss.backward()
            continue
        whole.data[3, 4] = 2.0
        logits.grad = None
        with pytest.raises(mimose.RecomputationError, match="were edited"):
            loss.backward()
        assert logits.grad is not None


HOLDERS = {
    "nobody": lambda whole, viewed: None,
    "a name": lambda whole, viewed: whole,
    "a name of the view": lambda whole, viewed: viewed,
    "an alias": lambda whole, viewed: whole.detach(),
    "an array": lambda whole, viewed: whole.detach().numpy(),
    "a storage": lambda whole, viewed: whole.untyped_storage(),
    "another loss": lambda whole, viewed: whole.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("is_view", [False, True])
def test_logits_that_somebody_holds_stay(holder, is_view):
    """The gradient takes their place only where nobody can see that."""
    results = []
    for function in (F.cross_entropy, mimose.cross_entropy):
        weight = torch.ones(200, 3, requires_grad=True)
        given, labels, _ = made(33, 3, torch.float32)
        _, labels, _ = made(33, 200, torch.float32)
        whole = F.linear(given.view(3, 11, 3) if is_view else given, weight)
        before = whole.detach().clone()
        viewed = whole.view(-1, 200) if is_view else whole
        loss = function(viewed, labels)
        held = HOLDERS[holder](whole, viewed)
        total = loss + held if holder == "another loss" else loss
        del whole, viewed
        with StorageTracker() as tracker:
            total.backward()
        if holder.startswith("a name"):
            assert torch.equal(before, held.view(before.shape))
        results.append((loss.detach(), given.grad, weight.grad))
        reuses = tracker.peak_bytes < before.nbytes
        assert function is F.cross_entropy or reuses == (holder == "nobody")
    assert equal(*results)


def test_a_graph_that_is_kept_gives_the_same_again():
    """With retain_graph the second backward has what the first one had."""
    logits, labels, _ = made(33, 200, torch.float32)
    loss = mimose.cross_entropy(logits * 1.0, labels)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)


@pytest.mark.parametrize("wrapper", ["checkpoint", "save_on_cpu"])
def test_inside_of_others_hooks(wrapper):
    """A loss in a checkpointed region, or with offloaded tensors, is the same."""
    found = []
    for function in (F.cross_entropy, mimose.cross_entropy):
        logits, labels, _ = made(33, 200, torch.float32)

        def loss_of(x, function=function, labels=labels):
            return function(x * 2.0, labels)

        if wrapper == "checkpoint":
            loss = torch.utils.checkpoint.checkpoint(
                loss_of, logits, use_reentrant=False
            )
        else:
            with torch.autograd.graph.save_on_cpu():
                loss = loss_of(logits)
        loss.backward()
        found.append((loss.detach(), logits.grad))
    assert equal(*found)


def test_memory():
    """In half precision: logits and chunks, where the plain loss takes six times."""
    taken = {}
    labels = torch.arange(256)
    for name in ("plain", "own"):
        given = torch.rand(256, 4, dtype=torch.bfloat16)
        weight = torch.rand(4000, 4, dtype=torch.bfloat16, requires_grad=True)
        with StorageTracker() as tracker:
            logits = F.linear(given, weight)
            n_bytes = logits.nbytes
            if name == "own":
                loss = mimose.cross_entropy(logits, labels, cast=torch.float32)
            else:
                loss = F.cross_entropy(logits.float(), labels)
            del logits
            loss.backward()
        taken[name] = tracker.peak_bytes / n_bytes
    assert taken["plain"] >= 6
    assert taken["own"] < 1.1


def test_chunks_begin_alike():
    """The rows before a chunk take a multiple of a vector's bytes, whatever the row."""
    for n_classes, dtype in itertools.product((7, 50257, 128256), DTYPES):
        row_bytes = n_classes * dtype.itemsize
        assert 0 == rows.rows_of_chunk(row_bytes, "cpu") * row_bytes % 16
