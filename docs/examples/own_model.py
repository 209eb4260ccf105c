"""Plan for the layers of a model of one's own, and look at a plan."""

import torch
from torch import nn

import mimose


class Mixer(nn.Module):
    """Weigh every position by the mean of those before it."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, states):
        """Return the states with the layer's output added."""
        hidden = nn.functional.gelu(self.up(self.norm(states)))
        mean = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).view(-1, 1)
        return states + self.down(hidden * torch.sigmoid(mean))


class Forecaster(nn.Sequential):
    """Predict every value of a series from those before it."""

    def __init__(self, width, depth):
        layers = [Mixer(width) for _ in range(depth)]
        super().__init__(nn.Linear(1, width), *layers, nn.Linear(width, 1))


torch.manual_seed(0)
model = Forecaster(width=32, depth=6)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(length):
    """Take one step on sines that begin anywhere."""
    series = torch.sin(torch.arange(length) / 9 + 6 * torch.rand(8, 1))[..., None]
    (model(series[:, :-1]) - series[:, 1:]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# The longest series with everything recomputed need this much. Without `layers` the
# layers are looked for; here their class is named.
with mimose.attach(model, budget=1.0, layers=Mixer, planner="full") as probe:
    for _ in range(2):
        train(768)
least_bytes = probe.records[-1].observed_peak_bytes

with mimose.attach(model, budget=least_bytes + 20 * 2**20, layers=Mixer) as session:
    for length in torch.randint(64, 768, (24,)).tolist():
        train(length)
    print(session.explain({"input.1": 760}))  # dimension 1 of the input
print(session.report())
