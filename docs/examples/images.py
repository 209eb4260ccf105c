"""Train a small residual network on images of many sizes."""

import random

import torch
from torch import nn

import mimose

torch.manual_seed(0)


class Block(nn.Module):
    """Two convolutions beside a shortcut, each behind its norm and activation."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(width),  # its statistics move once, recomputed or not
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )

    def forward(self, images):
        """Add the body's output to the input."""
        return images + self.body(images)


stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
model = nn.Sequential(stem, *(Block(8) for _ in range(6)), head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(height, width):
    """Take one step: the brighter the image, the higher its class."""
    labels = torch.randint(0, 4, (4,))
    images = torch.randn(4, 3, height, width) + labels.view(-1, 1, 1, 1)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


# The largest images with everything recomputed need this much.
with mimose.attach(model, budget=1.0, planner="full") as probe:
    for _ in range(2):
        train(288, 288)
least_bytes = probe.records[-1].observed_peak_bytes

sides = random.Random(0)
with mimose.attach(model, budget=least_bytes + 20 * 2**20) as session:
    for _ in range(24):
        train(height=sides.randrange(96, 289, 32), width=sides.randrange(96, 289, 32))
print(session.report())
