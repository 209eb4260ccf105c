"""Train a small Llama by policy gradients, in one process or under torchrun."""

import os

import torch
import torch.nn.functional as F
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import mimose

if "RANK" in os.environ and not distributed.is_initialized():
    distributed.init_process_group("gloo")
n_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=256, intermediate_size=128, pad_token_id=0, **sizes)
model = LlamaForCausalLM(config)
wrapped = DistributedDataParallel(model) if n_ranks > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = mimose.attach(model, budget="+120MiB")
if n_ranks > 1:  # each rank samples other texts
    torch.manual_seed(distributed.get_rank())


def rollouts(n):
    """Sample n texts on each rank; the reward is the share of even tokens."""
    found = []
    for length in torch.randint(4, 250, (n,)).tolist():
        prompt = torch.randint(1, 256, (1, length))
        with torch.no_grad():
            text = model.generate(prompt, do_sample=True, max_new_tokens=8)[0]
        answer = text[length:]
        found.append((text, length, float((answer % 2 == 0).float().mean())))
    gathered = [found] * n_ranks
    if n_ranks > 1:
        distributed.all_gather_object(gathered, found)
    return [sample for own in gathered for sample in own]


for _ in range(5):
    texts, prompts, rewards = zip(*rollouts(32 // n_ranks), strict=True)
    advantages = torch.tensor(rewards) - sum(rewards) / len(rewards)
    plan = mimose.balance([len(text) for text in texts], session)
    for rows, weight in plan.of_rank():
        ids = pad_sequence([texts[i] for i in rows], batch_first=True)
        logits = wrapped(input_ids=ids, attention_mask=(ids > 0).long()).logits
        loss = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
        starts = torch.tensor([prompts[i] for i in rows])[:, None]
        answers = (torch.arange(1, ids.shape[1]) >= starts) & (ids[:, 1:] > 0)
        scores = (loss * answers).sum(1) / answers.sum(1).clamp_min(1)
        (weight * (advantages[list(rows)] * scores).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
print(session.report())
