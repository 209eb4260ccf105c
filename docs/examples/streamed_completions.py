"""Train a policy on a replay of its own completions, which have many lengths."""

from collections import deque

import torch
from torch import nn

import mimose

_END, _MOST = 0, 200


class Policy(nn.Module):
    """Score the next token by all before it."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        layers = [nn.TransformerEncoderLayer(width, 2, 128, 0.0) for _ in range(6)]
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens):
        """Return (n_rows, length, 16) scores."""
        states = self.embed(tokens).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(len(states))
        for layer in self.layers:
            states = layer(states, mask)
        return self.head(states.transpose(0, 1))


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
replay = deque(maxlen=160)


@torch.no_grad()
def generate(n_rows=80):
    """Complete `n_rows` prompts; a completion is as good as its share of sevens."""
    tokens, at_least = torch.full((n_rows, 1), 7), torch.randint(8, _MOST, (n_rows,))
    for n in range(1, _MOST):
        scores = policy(tokens[:, -16:])[:, -1]
        scores[n < at_least, _END] = -torch.inf
        new = torch.distributions.Categorical(logits=scores).sample()
        tokens = torch.cat([tokens, new[:, None]], 1)
    for row, length in zip(tokens, (tokens == _END).int().argmax(1), strict=True):
        own = row[: length + 1] if length else row
        replay.append((own, (own == 7).float().mean()))


def collate(samples):
    """Pad completions by -1; return them and what they are better than the mean."""
    tokens, rewards = zip(*samples, strict=True)
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1)
    return padded, torch.stack(rewards) - torch.stack([r for _, r in replay]).mean()


with mimose.attach(policy, budget="+120MiB") as session:
    stream = mimose.BatchStream(
        replay, session, length=lambda sample: len(sample[0]), collate_fn=collate
    )
    for _ in range(3):
        generate()
        for tokens, better in stream:  # what the replay holds now, each once
            scores = policy(tokens[:, :-1].clamp(0)).transpose(1, 2)
            loss = nn.functional.cross_entropy(
                scores, tokens[:, 1:], ignore_index=-1, reduction="none"
            )
            (loss.mean(1) * better).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
print(session.report())
