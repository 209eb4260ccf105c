"""Fill the budget from pictures, whose sizes are known behind a processor only."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import mimose


class Pictures(IterableDataset):
    """Pictures of many sizes, each with a question of some words; a class to answer."""

    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for _ in range(400):
            height, width, n_words, label = torch.randint(4, 20, (4,), generator=draw)
            pixels = torch.randn(3, 8 * height, 8 * width, generator=draw) + label % 4
            words = torch.randint(100, (n_words,), generator=draw)
            yield process(pixels, words), label % 4


def process(pixels, words):
    """Cut a picture into patches of 8 by 8 pixels, as a processor does."""
    patches = nn.functional.unfold(pixels[None], 8, stride=8)[0].T
    return {"patches": patches, "words": words}


def lengths(sample):
    """Return how long a processed sample is, by the sizes of the model's inputs."""
    return {f"{name}.1": len(values) for name, values in sample[0].items()}


def collate(samples):
    """Pad patches and words."""
    given, labels = zip(*samples, strict=True)
    columns = {name: [each[name] for each in given] for name in given[0]}
    pad = nn.utils.rnn.pad_sequence
    batch = {name: pad(own, batch_first=True) for name, own in columns.items()}
    return batch, torch.stack(labels)


class Reader(nn.Module):
    """Read patches and words one after the other."""

    def __init__(self, width=32):
        super().__init__()
        self.see, self.read = nn.Linear(192, width), nn.Embedding(100, width)
        layer = [nn.TransformerEncoderLayer(width, 2, 128, 0.0) for _ in range(6)]
        self.layers, self.head = nn.ModuleList(layer), nn.Linear(width, 4)

    def forward(self, patches, words):
        """Return the scores of the classes."""
        states = torch.cat([self.see(patches), self.read(words)], 1).transpose(0, 1)
        for layer in self.layers:
            states = layer(states)
        return self.head(states.mean(0))


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with mimose.attach(model, budget="+120MiB") as session:
    samples = DataLoader(Pictures(), batch_size=None)
    options = {"length": lengths, "collate_fn": collate, "max_rows": 24}
    for batch, labels in mimose.BatchStream(samples, session, **options):
        nn.functional.cross_entropy(model(**batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
print(session.report())
