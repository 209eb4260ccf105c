"""Models of transformers, from tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.proofs.settings.case import ROWS, Training, World, setting
from benchmarks.proofs.settings.parts import cross_entropy, next_token_loss
from mimose.bench.zoo import builder

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_TOWER = {key: value for key, value in _TEXT.items() if key != "vocab_size"}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Batch = dict[str, Any]


def _training(
    world: World, model: nn.Module, batch: Callable[[int], Batch], **changes: Any
) -> Training:
    """Train a model that returns its loss."""
    return world.train(model, lambda length: model(**batch(length)).loss, **changes)


def _masked(world: World, length: int, rows: int = ROWS) -> Batch:
    """Make padded texts, a label a token, none where it is padding."""
    ids = world.ids(length, rows)
    ends = world.integers(length // 2, rows, 1) + length // 2
    mask = (torch.arange(length, device=ids.device)[None] <= ends).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def _llama(**changes: Any) -> nn.Module:
    return builder("LlamaConfig", "LlamaForCausalLM", **_DECODER, **_SPECIAL)(**changes)


@setting()
def masked_language_model(world: World) -> Training:
    """BERT: padded batches, labels of some tokens."""
    model = builder("BertConfig", "BertForMaskedLM", **_TEXT)()
    return _training(world, model, lambda length: _masked(world, length))


@setting()
def padded_language_model(world: World) -> Training:
    """Llama: padded batches, labels masked (instruction tuning)."""
    return _training(world, _llama(), lambda length: _masked(world, length))


@setting()
def packed_positions(world: World) -> Training:
    """Llama: packed texts in one row, told apart by position_ids."""

    def batch(length: int) -> Batch:
        ids, first = world.ids(length, 1), world.number(length // 4, length // 2)
        parts = [torch.arange(first), torch.arange(length - first)]
        positions = torch.cat(parts)[None].to(world.device)
        return {"input_ids": ids, "labels": ids, "position_ids": positions}

    return _training(
        world,
        _llama(use_cache=False),
        batch,
        lengths=(128, 496),
        multiple=16,
    )


@setting()
def adapters(world: World) -> Training:
    """LoRA by peft: the base is frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_llama(), config)
    return _training(world, model, lambda length: _masked(world, length))


@setting()
def mixtral(world: World) -> Training:
    """Mixtral: transformers' mixture of experts, with the router's loss."""
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model: Any = builder(
        "MixtralConfig", "MixtralForCausalLM", **_DECODER, **_SPECIAL, **routing
    )(output_router_logits=True)
    model.set_experts_implementation("eager")
    return _training(world, model, lambda length: _masked(world, length))


@setting()
def mamba(world: World) -> Training:
    """Mamba: a state-space model, its scan in plain torch."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}
    model = builder("MambaConfig", "MambaForCausalLM", **sizes, **_SPECIAL)(
        state_size=8
    )

    def batch(length: int) -> Batch:
        ids = world.ids(length, 4)
        return {"input_ids": ids, "labels": ids}

    return _training(world, model, batch, lengths=(8, 32))


@setting()
def clip(world: World) -> Training:
    """CLIP: a text and a vision encoder, the contrastive loss inside."""
    model = builder("CLIPConfig", "CLIPModel")(
        text_config={**_TEXT, **_SPECIAL, "max_position_embeddings": 128},
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )

    def batch(length: int) -> Batch:
        return {
            "input_ids": world.ids(length),
            "pixel_values": world.floats(ROWS, 3, 32, 32),
            "return_loss": True,
        }

    return _training(world, model, batch)


def _llava(world: World, *, trains_tower: bool) -> Training:
    vision = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    model: Any = builder("LlavaConfig", "LlavaForConditionalGeneration")(
        text_config={**_DECODER, **_SPECIAL, "model_type": "llama"},
        vision_config={**_TOWER, **vision},
        image_token_index=5,
        image_seq_length=16,
    )
    model.model.vision_tower.requires_grad_(trains_tower)

    def batch(length: int) -> Batch:
        ids = world.ids(length, 4).clamp(min=6)
        images = torch.full((4, 16), 5, device=ids.device)
        ids = torch.cat([images, ids], dim=1)
        labels = ids.masked_fill(ids == 5, -100)
        pixels = world.floats(4, 3, 32, 32)
        mask = torch.ones_like(ids)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "pixel_values": pixels,
            "labels": labels,
        }

    return _training(world, model, batch, lengths=(16, 100))


@setting()
def llava(world: World) -> Training:
    """LLaVA: an image's patches among the tokens of a text; the image tower frozen."""
    return _llava(world, trains_tower=False)


@setting("recomputed", "never measured")
def llava_trained_tower(world: World) -> Training:
    """LLaVA: the image tower is trained, but not its last layer, which nothing uses."""
    return _llava(world, trains_tower=True)


@setting()
def vision_transformer(world: World) -> Training:
    """ViT: images of changing sizes, positions interpolated."""
    model = builder("ViTConfig", "ViTForImageClassification", **_TOWER)(
        image_size=64, patch_size=8
    )

    def batch(size: int) -> Batch:
        return {
            "pixel_values": world.floats(ROWS, 3, size, size),
            "labels": world.integers(2, ROWS),
            "interpolate_pos_encoding": True,
        }

    return _training(world, model, batch, lengths=(24, 72), multiple=8)


def _wav2vec2(world: World, layerdrop: float) -> Training:
    model = builder("Wav2Vec2Config", "Wav2Vec2ForCTC", **_TEXT)(
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=layerdrop,
        mask_time_prob=0.2,
        mask_time_length=4,
        ctc_zero_infinity=True,
    )

    def batch(length: int) -> Batch:
        sound = world.floats(4, 20 * length)
        return {"input_values": sound, "labels": world.ids(6, 4)}

    return _training(world, model, batch, lengths=(24, 96))


@setting()
def wav2vec2(world: World) -> Training:
    """wav2vec 2.0: sound of changing lengths, CTC, time masked at random by NumPy."""
    return _wav2vec2(world, 0.0)


@setting()
def wav2vec2_layerdrop(world: World) -> Training:
    """wav2vec 2.0 with its default LayerDrop of 0.1."""
    return _wav2vec2(world, 0.1)


@setting()
def whisper(world: World) -> Training:
    """Whisper: speech to text, the text's length changes."""
    model = builder("WhisperConfig", "WhisperForConditionalGeneration", **_SPECIAL)(
        vocab_size=64,
        num_mel_bins=8,
        d_model=64,
        encoder_layers=2,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=32,
        max_target_positions=128,
        decoder_start_token_id=1,
    )

    def batch(length: int) -> Batch:
        return {
            "input_features": world.floats(ROWS, 8, 64),
            "labels": world.ids(length),
        }

    return _training(world, model, batch)


_t5 = builder(
    "T5Config",
    "T5ForConditionalGeneration",
    **{"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128},
    **{"num_layers": 3, "num_heads": 4},
    **{"decoder_start_token_id": 0, "use_cache": False},
)


@setting()
def teacher_forcing(world: World) -> Training:
    """T5: decoder inputs and the loss, with label smoothing, made outside."""
    model = _t5()

    def loss(length: int) -> Any:
        source, target = world.ids(length), world.ids(max(4, length // 2))
        shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], dim=1)
        logits = model(input_ids=source, decoder_input_ids=shifted).logits
        smooth = -logits.log_softmax(-1).mean()
        return 0.9 * cross_entropy(logits, target) + 0.1 * smooth

    return world.train(model, loss)


@setting()
def scheduled_sampling(world: World) -> Training:
    """T5: a first forward under no_grad makes what the second is fed."""
    model = _t5()

    def loss(length: int) -> Tensor:
        source, target = world.ids(length), world.ids(length // 2)
        with torch.no_grad():
            logits = model(input_ids=source, decoder_input_ids=target).logits
        fed = torch.where(world.floats(*target.shape) > 0, target, logits.argmax(-1))
        logits = model(input_ids=source, decoder_input_ids=fed).logits
        return next_token_loss(logits, target)

    return world.train(model, loss)


@setting()
def generation_between(world: World) -> Training:
    """T5: texts are generated in eval mode between steps, as for a metric."""
    model: Any = _t5().to(world.device)
    optimizer = world.adamw(model)

    def step(length: int) -> Tensor:
        source, target = world.ids(length), world.ids(length // 2)
        loss = world.descend(optimizer, model(input_ids=source, labels=target).loss)
        model.eval()
        made = model.generate(source[:2], max_new_tokens=3, do_sample=False)
        model.train()
        score: Tensor = made.float().mean()
        return loss + score

    return Training(roots=[model], step=step)
