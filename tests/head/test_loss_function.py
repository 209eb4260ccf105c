"""The loss of models of transformers goes by rows, and is theirs again at the end."""

import contextlib
import copy
import pickle

import pytest
import torch
import transformers

import mimose
from mimose.head import cross_entropy as by_rows
from mimose.head import loss_function, rows
from mimose.head.late_upcast import LateUpcast, late
from mimose.run import loss_choice

_OWN = "_loss_function"


@pytest.fixture
def calls(monkeypatch):
    """How often a loss went by rows; small logits do, in many chunks, if it can be."""
    for module in (by_rows, loss_function):
        monkeypatch.setattr(module, "LEAST_BYTES", 0)
    monkeypatch.setitem(rows._CHUNK_BYTES, "cpu", 4096)
    monkeypatch.setattr(loss_choice, "_LARGE_LOGITS", 0)
    monkeypatch.setattr(loss_choice, "_ROWS_COST", -1)
    found, loss_of = [], by_rows.loss_of

    def noted(*args):
        found.append(args)
        return loss_of(*args)

    monkeypatch.setattr(by_rows, "loss_of", noted)
    return found


def llama():
    """Build a small Llama from the same seed every time."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def batches_of(toys, n_batches=6):
    """Make batches with labels, some of them ignored."""
    return toys.zoo_batches("gpt2", n_batches)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_like_the_bare_model(toys, calls, name, dtype):
    """Losses and gradients, dropout on, for float32 and for a cast to it."""
    model = (toys.zoo_model("gpt2") if name == "gpt2" else llama()).to(dtype)
    model.config.use_cache = False
    batches = [
        {k: v % 211 if k == "input_ids" else v for k, v in b.items()}
        for b in batches_of(toys)
    ]
    for batch in batches:
        batch["labels"] = torch.where(batch["labels"] < 0, -100, batch["input_ids"])
    bare = toys.train(copy.deepcopy(model), batches)
    assert [] == calls
    with mimose.attach(model, "1TiB"):
        trained = toys.train(model, batches)
    assert [] == toys.differences(bare, trained)
    assert calls


def test_items_in_batch(toys, calls):
    """The Trainer's number of items is divided by as before."""
    model = llama()
    batch = {"input_ids": torch.arange(40).view(2, 20), "num_items_in_batch": 17}
    batch["labels"] = batch["input_ids"]
    expected = model(**batch).loss
    with mimose.attach(model, "1TiB"):
        assert torch.equal(expected, model(**batch).loss)
    assert 1 <= len(calls)


def test_detach_leaves_nothing():
    """The model's function is its own again, or what the user had given it."""
    model = llama()
    original = model.loss_function
    session = mimose.attach(model, "1TiB")
    assert original is not model.loss_function
    assert "ForCausalLMLoss" == model.loss_function.__name__
    session.detach()
    assert original is model.loss_function
    assert _OWN not in vars(model)
    model.loss_function = given = transformers.loss.loss_utils.ForMaskedLMLoss
    with mimose.attach(model, "1TiB"):
        pass
    assert given is model.loss_function


def test_a_function_given_meanwhile_stays():
    """What the user sets while the session lives is the user's."""
    model = llama()
    with mimose.attach(model, "1TiB"):
        model.loss_function = own = lambda **_: torch.zeros(())
    assert own is model.loss_function


def test_a_users_function_is_left_alone():
    """A loss that is not of transformers is not handed other tensors."""
    model = llama()
    model.loss_function = own = lambda **_: torch.zeros(())
    with mimose.attach(model, "1TiB"):
        assert own is model.loss_function


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("is_given", [False, True])
def test_copies_have_the_original(copied, is_given):
    """No copy takes the session's function along, nor the class's as its own."""
    model = llama()
    original = model.loss_function
    if is_given:
        model.loss_function = original = transformers.loss.loss_utils.ForMaskedLMLoss
    with mimose.attach(model, "1TiB"):
        made = copied(model)
        assert copied(model.loss_function) in (original, model.loss_function)
    assert original is made.loss_function
    assert is_given == (_OWN in vars(made))
    for each in (made, model):
        assert "__getstate__" not in vars(each)
    if not is_given:
        made.loss_type = "ForMaskedLM"
        assert transformers.loss.loss_utils.ForMaskedLMLoss is made.loss_function


def test_attributes_taken_along_pass_through(calls):
    """What holds the function after `detach` has the plain loss."""
    model = llama()
    with mimose.attach(model, "1TiB"):
        held = model.loss_function
    ids = torch.arange(40).view(2, 20)
    logits = torch.randn(2, 20, 211)
    expected = model.loss_function(logits, ids, vocab_size=211)
    assert torch.equal(expected, held(logits, ids, vocab_size=211))
    assert [] == calls


def test_another_type_of_loss_is_followed(calls):
    """The class chooses by the model's `loss_type` in each call, as without mimose."""
    model = llama()
    ids = torch.arange(40).view(2, 20)
    found = []
    for is_attached in (False, True):
        model.loss_type = "ForCausalLM"
        with contextlib.ExitStack() as stack:
            if is_attached:
                stack.enter_context(mimose.attach(model, "1TiB"))
            for kind in ("ForCausalLM", "ForMaskedLM"):
                model.loss_type = kind
                found.append(model(input_ids=ids, labels=ids).loss.detach())
    assert found[0] != found[1]
    assert found[:2] == found[2:]
    assert calls


def test_an_array_edited_before_backward_is_an_error(calls):
    """Metrics worked out in place on the logits would change gradients in silence."""
    model = llama()
    ids = torch.arange(40).view(2, 20)
    with mimose.attach(model, "1TiB"):
        out = model(input_ids=ids, labels=ids)
        numbers = out.logits.detach().numpy()
        numbers -= numbers.max(-1, keepdims=True)
        with pytest.raises(mimose.RecomputationError, match="loss_function"):
            out.loss.backward()
    assert 1 == len(calls)


def test_a_state_of_before_is_refused():
    """It was learned with all losses by rows, or none."""
    model = llama()
    session = mimose.attach(model, "1TiB")
    state = session.state_dict()
    session.detach()
    with mimose.attach(model, "1TiB") as other:
        other.load_state_dict(state)
        state["of"]["settings"]["losses by rows"] = "LlamaForCausalLM"
        with pytest.raises(mimose.StateMismatchError, match="losses by rows"):
            other.load_state_dict(state)


def test_it_goes_by_rows_where_the_budget_asks_for_it(toys, monkeypatch):
    """Recomputing all under a plain loss passes the budget; in a large one it runs."""
    went, loss_of = [], by_rows.loss_of
    monkeypatch.setattr(by_rows, "loss_of", lambda *a: (went.append(0), loss_of(*a))[1])
    config = llama().config
    config.vocab_size = 20_000
    lengths = [2, 50, *[20, 30, 40, 50, 25, 35, 45, 28, 38, 48] * 2]
    ids = [torch.arange(2 * n).view(2, n) for n in lengths]
    batches = [{"input_ids": each, "labels": each} for each in ids]

    def trained(budget, **options):
        torch.manual_seed(7)
        model = transformers.LlamaForCausalLM(config).train()
        with (
            toys.counting() as meter,
            mimose.attach(model, budget, meter=meter, **options) as session,
        ):
            return toys.train(model, batches), session.peak_bytes

    bare, least = trained("1GiB", planner="full")
    kept, _ = trained("1GiB")
    assert [] == toys.differences(bare, kept)
    assert len(went) <= 1  # the first, whose logits may be any
    budget = least - 8 * 2**20
    by_row, peak = trained(budget)
    assert [] == toys.differences(bare, by_row)
    assert peak <= budget
    assert went


def test_late_upcast_is_a_tensor_to_all_others():
    """What is no cross-entropy sees the logits, cast if that was asked for."""
    logits = torch.rand(2, 3, 5).bfloat16()
    seen = late(logits).float()
    assert isinstance(seen.view(-1, 5), LateUpcast)
    assert (torch.float32, (6, 5)) == (seen.view(-1, 5).dtype, seen.view(-1, 5).shape)
    for actual in (seen * 2, seen.mul(2), torch.mul(seen, 2)):
        assert type(actual) is torch.Tensor
        assert torch.equal(logits.float() * 2, actual)
    assert torch.equal(logits.logsumexp(-1), late(logits).logsumexp(-1))
    assert torch.equal(torch.stack([logits]), torch.stack([late(logits)]))


def test_explain_says_what_the_head_costs(toys, meter):
    """Where the head makes the peak, its bytes and what would free more are told."""
    torch.manual_seed(1)
    config = copy.deepcopy(llama().config)
    config.vocab_size = 5000
    model = transformers.LlamaForCausalLM(config).train()
    batches = [
        {"input_ids": ids, "labels": ids}
        for ids in (torch.arange(n * 2).view(2, n) for n in (20, 30, 40, 50) * 3)
    ]
    with mimose.attach(model, "1TiB", meter=meter) as session:
        toys.train(model, batches)
        text = " ".join(session.explain().split())
    assert "the head takes" in text
    assert "Liger's fused linear cross-entropy" in text
    assert "mimose.cross_entropy" not in text
