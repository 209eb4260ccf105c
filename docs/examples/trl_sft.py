"""Fine-tune a small Llama on docstrings, with the SFTTrainer of TRL."""

import email
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from mimose.bench.corpus import load_corpus, train_tokenizer
from mimose.integrations.transformers import MimoseCallback

torch.manual_seed(0)
texts = [text.text for text in load_corpus(root=Path(email.__file__).parent).train]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=train_tokenizer(texts, 1024), eos_token="[SEP]", pad_token="[PAD]"
)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
)
model = LlamaForCausalLM(config)

callback = MimoseCallback(budget=0.8)
trainer = SFTTrainer(
    model,
    SFTConfig(
        tempfile.mkdtemp(),
        activation_checkpointing=False,  # on by default; mimose decides in its place
        per_device_train_batch_size=8,
        max_length=320,
        max_steps=24,
        bf16=False,
        report_to=[],
        save_strategy="no",
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    callbacks=[callback],
)
trainer.train()

session = callback.session
print(session.report())
