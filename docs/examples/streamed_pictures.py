"""Fill the budget from pictures, whose sizes are known behind a processor only."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

import mimose


class Pictures(IterableDataset):
    """Pictures of many sizes, each with a question of some words; a class to answer."""

    def __iter__(self):
        for height, width, n_words, label in torch.randint(4, 20, (400, 4)).tolist():
            pixels = torch.randn(1, 3, 8 * height, 8 * width) + label % 4
            # A processor cuts a picture into patches, here of 8 by 8 pixels.
            patches = nn.functional.unfold(pixels, 8, stride=8)[0].T
            words = torch.randint(100, (n_words,))
            yield {"patches": patches, "words": words}, label % 4


def lengths(sample):
    """Return how long a processed sample is, by the sizes of the model's inputs."""
    return {f"{name}.1": len(values) for name, values in sample[0].items()}


def collate(samples):
    """Pad patches and words."""
    given, labels = zip(*samples, strict=True)
    columns = {name: [each[name] for each in given] for name in given[0]}
    batch = {name: pad_sequence(own, True) for name, own in columns.items()}
    return batch, torch.tensor(labels)


class Reader(nn.Module):
    """Read patches and words one after the other."""

    def __init__(self, width=32):
        super().__init__()
        self.see, self.read = nn.Linear(192, width), nn.Embedding(100, width)
        layers = [nn.TransformerEncoderLayer(width, 2, 128, 0.0) for _ in range(6)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 4)

    def forward(self, patches, words):
        """Return the scores of the classes."""
        states = torch.cat([self.see(patches), self.read(words)], 1).transpose(0, 1)
        return self.head(self.layers(states).mean(0))


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with mimose.attach(model, budget="+120MiB") as session:
    stream = mimose.BatchStream(Pictures(), session, length=lengths, collate_fn=collate)
    for batch, labels in stream:
        nn.functional.cross_entropy(model(**batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
print(session.report())
