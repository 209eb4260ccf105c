"""Train global batches that the ranks share by time, with the SFTTrainer of TRL."""

import email
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import mimose
from mimose.bench.corpus import load_corpus, train_tokenizer
from mimose.integrations.transformers import MimoseCallback

torch.manual_seed(0)
texts = [text.text for text in load_corpus(root=Path(email.__file__).parent).train]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=train_tokenizer(texts, 1024), eos_token="[SEP]", pad_token="[PAD]"
)
sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128}
config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=6, **sizes)
callback = MimoseCallback(budget=0.8)


class BalancedTrainer(SFTTrainer):
    """Trains micro-batches that `mimose.balance` chooses."""

    def get_train_dataloader(self):
        """Yield global batches of 32 samples, the same on all ranks."""
        order = torch.Generator().manual_seed(self.args.seed)
        how = {"generator": order, "drop_last": True, "collate_fn": list}
        return DataLoader(self.train_dataset, 32, shuffle=True, **how)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Train this rank's part of a global batch; the loss is a mean over labels."""
        model.train()
        lengths = [len(sample["input_ids"]) for sample in inputs]
        plan = mimose.balance(
            lengths, callback.session, counts=[n - 1 for n in lengths]
        )
        total = 0.0
        for rows, weight in plan.of_rank():
            part = self.data_collator([inputs[i] for i in rows])
            loss = weight * self.compute_loss(model, self._prepare_inputs(part))
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


how = {"activation_checkpointing": False, "bf16": False}  # the first: mimose decides
how |= {"max_length": 320, "max_steps": 5, "report_to": [], "save_strategy": "no"}
args = SFTConfig(tempfile.mkdtemp(), **how)
data = Dataset.from_dict({"text": texts})
options = {"processing_class": tokenizer, "callbacks": [callback]}
trainer = BalancedTrainer(LlamaForCausalLM(config), args, train_dataset=data, **options)
trainer.train()
session = callback.session
print(session.report())
