"""The loss by rows: torch's own to the last bit, and plain where it cannot be."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import mimose
from mimose import loss_by_rows
from mimose.measure.storage import StorageTracker

BOTH = F.cross_entropy, mimose.cross_entropy
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
N_ROWS, N_CLASSES = 600, 1023
"""2.3 MiB in float32: of two chunks on a CPU, and no row fills a vector."""


def made(n_rows=N_ROWS, n_classes=N_CLASSES, dtype=torch.float32, kind="some ignored"):
    """Return logits that need a gradient, labels, and the ignored class."""
    generator = torch.Generator().manual_seed(n_rows * n_classes)
    logits = 3 * torch.randn(n_rows, n_classes, generator=generator)
    labels = torch.randint(0, n_classes, (n_rows,), generator=generator)
    ignored = 0 if kind == "zero ignored" else -100
    every = {"some ignored": 5, "zero ignored": 5, "all ignored": 1}.get(kind)
    if every is not None:
        labels[::every] = ignored
    return logits.to(dtype).requires_grad_(), labels, ignored


def trained(loss_of, logits):
    """Return the loss and the logits' gradient for a gradient that is not 1."""
    logits = logits.detach().requires_grad_()
    loss = loss_of(logits * 1.0)
    loss.backward(torch.full_like(loss, 0.37))
    return loss.detach(), logits.grad


def goes_by_rows(loss):
    """Whether a loss did."""
    return "ByRows" in loss.grad_fn.name()


same_bits = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------ the function


KINDS = "all count", "some ignored", "all ignored", "zero ignored"
REDUCTIONS = "mean", "sum", "none"
CASES = [*itertools.product([torch.float32], KINDS, REDUCTIONS)]
CASES += [(dtype, KINDS[1], REDUCTIONS[0]) for dtype in DTYPES]


@pytest.mark.parametrize(("dtype", "kind", "reduction"), CASES)
def test_it_is_the_plain_one(dtype, kind, reduction):
    """Loss and gradient, for rows that fill a vector and others."""
    for n_classes in (1000, 1023):
        logits, labels, ignored = made(1100, n_classes, dtype, kind)
        options = {"target": labels, "ignore_index": ignored, "reduction": reduction}
        plain, own = (trained(partial(f, **options), logits) for f in BOTH)
        same_bits(own, plain)
        assert goes_by_rows(mimose.cross_entropy(logits, **options))


def cast_first(logits, labels):
    """Compute the plain loss of a copy in float32."""
    return F.cross_entropy(logits.float(), labels)


CASTING = cast_first, partial(mimose.cross_entropy, cast=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_it_casts_by_rows(dtype):
    """A cast to float32 before is part of it."""
    logits, labels, _ = made(200, 5003, dtype)
    plain, own = (trained(lambda x, f=f: f(x, labels), logits) for f in CASTING)
    same_bits(own, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"input": torch.rand(12, 50), "target": torch.arange(12)},
        {"weight": torch.rand(N_CLASSES)},
        {"label_smoothing": 0.1},
        {"target": torch.rand(N_ROWS, N_CLASSES).softmax(1)},
        {"cast": torch.float16},
    ],
)
def test_what_rows_do_not_give_is_left_to_the_plain_one(options):
    """Small logits and other losses are torch's own."""
    given = {"input": made()[0], "target": torch.arange(600), **options}
    given["input"] = given["input"].detach().requires_grad_()
    cast = given.pop("cast", None)
    own = mimose.cross_entropy(**given, cast=cast)
    given["input"] = given["input"].to(cast or torch.float32)
    assert torch.equal(F.cross_entropy(**given), own)
    assert not goes_by_rows(own)


@pytest.mark.parametrize("label", [N_CLASSES, -1])
def test_labels_that_are_no_classes(label):
    """The error is the plain function's."""
    with pytest.raises(IndexError, match="out of bounds"):
        mimose.cross_entropy(made()[0], torch.full((N_ROWS,), label))


def test_a_gradient_with_a_graph():
    """It is refused in words, as there is none to the second order."""
    logits, labels, _ = made()
    logits = logits.detach().requires_grad_()
    loss = mimose.cross_entropy(logits * 2.0, labels)
    with pytest.raises(mimose.MimoseError, match="create_graph"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_inside_of_others_hooks():
    """In a checkpointed region, or brought back with other strides, it is the same."""
    logits, labels, _ = made()

    def checkpointed(function, x):
        return checkpoint(function, x, labels, use_reentrant=False)

    def turn(tensor):
        return tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor

    def turned(function, x):
        with saved_tensors_hooks(lambda t: t, turn):
            return function(x, labels)

    for way in (checkpointed, turned):
        plain, own = (trained(partial(way, f), logits) for f in BOTH)
        same_bits(own, plain)


# ------------------------------------------------------------------ edits


EDITS = {
    "a tensor": lambda whole: whole.mul_(2.0),
    "one element": lambda whole: whole.data[7, 11:12].add_(1.0),
    "one that leaves the loss": lambda whole: whole.data[7, 11:12].add_(1e-5),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_an_edit_is_an_error(edit, keeps_graph):
    """Logits that were edited after the loss give no gradients, counted or not."""
    logits, labels, _ = made()
    whole = logits * 1.0
    loss = mimose.cross_entropy(whole, labels)
    EDITS[edit](whole)
    del whole
    with pytest.raises(mimose.RecomputationError, match="were edited between a loss"):
        loss.backward(retain_graph=keeps_graph)
    assert logits.grad is None


def test_an_edit_on_an_accelerator_is_told_at_the_end(monkeypatch):
    """No answer is waited for before the backward has ended, and then it fails."""
    logits, labels, _ = made()
    different_bits = loss_by_rows.different_bits
    monkeypatch.setattr(
        loss_by_rows, "different_bits", lambda *two: torch.tensor(different_bits(*two))
    )
    mimose.cross_entropy(logits * 1.0, labels).backward()
    logits.grad = None
    whole = logits * 1.0
    loss = mimose.cross_entropy(whole, labels)
    whole.data[3, 4] = 2.0
    with pytest.raises(mimose.RecomputationError, match="were edited"):
        loss.backward()
    assert logits.grad is not None


# ------------------------------------------------------------------ memory


HOLDERS = {
    "nobody": lambda whole, viewed: None,
    "a name": lambda whole, viewed: whole,
    "an alias": lambda whole, viewed: whole.detach(),
    "another loss": lambda whole, viewed: whole.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("is_view", [False, True])
def test_logits_that_somebody_holds_stay(holder, is_view):
    """The gradient takes their place only where nobody can see that."""
    results = []
    for function in BOTH:
        weight = torch.ones(8192, 3, requires_grad=True)
        given, _, _ = made(330, 3)
        labels = torch.arange(330)
        whole = F.linear(given.view(3, 110, 3) if is_view else given, weight)
        before = whole.detach().clone()
        viewed = whole.view(-1, 8192) if is_view else whole
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
    same_bits(*results)


def test_a_graph_that_is_kept_gives_the_same_again():
    """With retain_graph the second backward has what the first one had."""
    logits, labels, _ = made()
    loss = mimose.cross_entropy(logits * 1.0, labels)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)


def test_memory():
    """In half precision: logits and chunks, where the plain loss takes six times."""
    taken = []
    for loss_of in CASTING:
        weight = torch.rand(16_000, 4, dtype=torch.bfloat16, requires_grad=True)
        given, labels = torch.rand(1000, 4, dtype=torch.bfloat16), torch.arange(1000)
        with StorageTracker() as tracker:
            logits = F.linear(given, weight)
            n_bytes = logits.nbytes
            loss = loss_of(logits, labels)
            del logits
            loss.backward()
        taken.append(tracker.peak_bytes / n_bytes)
    assert taken[0] >= 6
    assert taken[1] < 1.25


# ------------------------------------------------------------------ in a session


def llama(vocabulary=20_000):
    """Build a small Llama from the same seed every time."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def batch_of(length, **others):
    """Return a batch of two texts of tokens, with labels of which some are ignored."""
    ids = torch.arange(2 * length).view(2, length)
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 3, -100), **others}


@pytest.fixture
def small(meter):
    """Return options of a session whose budget the logits are a part of."""
    return {"budget": "24MiB", "meter": meter}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_trains_like_the_bare_model(toys, small, name):
    """By rows where the budget is small, else plainly; GPT-2 has dropout."""
    model = llama()
    if name == "gpt2":
        model = toys.zoo_model("gpt2", vocab_size=20_000, use_cache=False)
    found, _ = toys.compare(model, [batch_of(20)] * 3, **small)
    assert [] == found
    for budget, by_rows in (("24MiB", True), ("1TiB", False)):
        with mimose.attach(model, **{**small, "budget": budget}):
            assert by_rows == goes_by_rows(model(**batch_of(20)).loss)


@pytest.mark.parametrize(("budget", "is_needed"), [("60MiB", False), ("27MiB", True)])
def test_it_goes_by_rows_where_the_budget_needs_it(small, budget, is_needed):
    """First where logits are large; plainly once all is known to fit so."""
    model, found = llama(), []
    with mimose.attach(model, **{**small, "budget": budget}, refine=False) as session:
        for length in (20, 24, 28, 22, 26, 30) * 4:
            loss = model(**batch_of(length)).loss
            found.append(goes_by_rows(loss))
            loss.backward()
            model.zero_grad()
        assert 0 == session.summary().steps_over
    assert found[0]
    assert is_needed == found[-1]


@pytest.mark.parametrize("is_given", [False, True])
def test_the_model_has_its_own_function_afterwards(small, is_given):
    """What the class chooses or the user gave; copies and pickles have it, too."""
    model = llama()
    if is_given:
        model.loss_function = transformers.loss.loss_utils.ForMaskedLMLoss
    original, attributes = model.loss_function, set(vars(model))
    with mimose.attach(model, **small):
        assert goes_by_rows(model(**batch_of(20)).loss)
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model.loss_function))
    assert original is model.loss_function is copied.loss_function is pickled
    assert attributes == set(vars(model))


def test_a_users_function_is_left_alone(small):
    """A loss that is not of transformers is not handed other tensors."""
    model, given = llama(), []

    def own(logits, **_):
        given.append(type(logits))
        return logits.float().mean()

    with mimose.attach(model, **small):
        model.loss_function = own
        model(**batch_of(20)).loss.backward()
        assert own is model.loss_function
    assert [torch.Tensor] == given


def test_another_type_of_loss_is_followed(small):
    """The class chooses by the model's `loss_type` in each call, as without mimose."""
    found = []
    for attach in (copy.copy, partial(mimose.attach, **small)):
        model = llama()
        attach(model)
        for model.loss_type in ("ForCausalLM", "ForMaskedLM"):
            found.append(model(**batch_of(20)).loss.detach())
    assert found[0] != found[1]
    assert found[:2] == found[2:]


def test_an_array_edited_before_backward_is_an_error(small):
    """Metrics worked out in place on the logits would change gradients in silence."""
    model = llama()
    with mimose.attach(model, **small):
        out = model(**batch_of(20))
        out.logits.detach().numpy().fill(0)
        with pytest.raises(mimose.RecomputationError, match="loss_function"):
            out.loss.backward()
