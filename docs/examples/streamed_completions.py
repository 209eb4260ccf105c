"""Train a policy on a replay of its own completions, which have many lengths."""

from collections import deque

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import mimose

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16,
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
    eos_token_id=0,
    pad_token_id=0,
)
policy = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
replay = deque(maxlen=160)


def generate(n_rows=80):
    """Complete prompts; a completion is as good as its share of sevens."""
    policy.eval()
    prompts = torch.randint(1, 16, (n_rows, 4))
    found = policy.generate(prompts, do_sample=True, max_new_tokens=120)
    for row in found:
        n = int((row != 0).sum())
        replay.append((row[:n], (row[:n] == 7).float().mean()))
    policy.train()


def collate(samples):
    """Pad completions; return them and how much better than the mean they are."""
    tokens, rewards = zip(*samples, strict=True)
    mean = torch.stack([reward for _, reward in replay]).mean()
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return padded, torch.stack(rewards) - mean


with mimose.attach(policy, budget="+120MiB") as session:
    stream = mimose.BatchStream(
        replay, session, length=lambda sample: len(sample[0]), collate_fn=collate
    )
    for _ in range(3):
        generate()
        for tokens, better in stream:  # what the replay holds now, each once
            scores = policy(input_ids=tokens).logits[:, :-1].transpose(1, 2)
            loss = nn.functional.cross_entropy(
                scores, tokens[:, 1:], ignore_index=0, reduction="none"
            )
            (loss.mean(1) * better).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
print(session.report())
