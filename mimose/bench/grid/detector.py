"""A one-stage detector: a ResNet, a feature pyramid, heads shared by its levels.

In the manner of FCOS (Tian et al., "FCOS: Fully Convolutional One-Stage Object
Detection", ICCV 2019), with dense losses, so that nothing but the image's size tells
how much memory a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

_ALPHA, _GAMMA = 0.25, 2.0
"""Of the focal loss (Lin et al., ICCV 2017)."""
_SIDES = 4


class Detector(nn.Module):
    """Finds boxes and their classes at every place of every level.

    Args:
        backbone: A `transformers` backbone; returns feature maps, the largest first.
        channels: Of those maps.
        width: Channels of the pyramid and the heads.
        n_classes: How many kinds of things there are.
        depth: Convolutions of each head before its last.
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: Sequence[int],
        *,
        width: int,
        n_classes: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.lateral = nn.ModuleList(nn.Conv2d(c, width, 1) for c in channels)
        self.smooth = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in channels
        )
        self.classes = _head(width, n_classes, depth)
        self.boxes = _head(width, _SIDES, depth)

    def forward(
        self, pixel_values: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss.

        Args:
            pixel_values: (batch, 3, height, width).
            boxes: (batch, n_boxes, 4): left, top, right, bottom, as shares of the
                image.
            labels: (batch, n_boxes) classes.
        """
        levels = self._pyramid(self.backbone(pixel_values).feature_maps)
        losses = [self._loss(level, boxes, labels) for level in levels]
        return torch.stack(losses).sum()

    def _pyramid(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the levels, the smallest first."""
        levels: list[torch.Tensor] = []
        above: torch.Tensor | None = None
        for features, lateral, smooth in zip(
            reversed(maps),
            reversed(self.lateral),
            reversed(self.smooth),
            strict=True,
        ):
            own = lateral(features)
            if above is not None:
                own = own + functional.interpolate(above, size=own.shape[-2:])
            above = own
            levels.append(smooth(own))
        return levels

    def _loss(
        self, level: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        scores, sides = self.classes(level), self.boxes(level).sigmoid()
        kinds, distances, is_inside = _targets(scores, boxes, labels)
        chances = scores.sigmoid()
        error = functional.binary_cross_entropy_with_logits(
            scores, kinds, reduction="none"
        )
        wrong = (chances - kinds).abs() ** _GAMMA
        weight = _ALPHA * kinds + (1 - _ALPHA) * (1 - kinds)
        n_inside = is_inside.sum().clamp(min=1)
        off = (sides - distances).abs().sum(dim=1) * is_inside
        loss: torch.Tensor = ((weight * wrong * error).sum() + off.sum()) / n_inside
        return loss


def _head(width: int, n_outputs: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, n_outputs, 3, padding=1))


@torch.no_grad()
def _targets(
    scores: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what is at each place: the last of the boxes that it is inside of.

    Returns:
        (batch, n_classes, height, width) classes; (batch, 4, height, width) distances
        to the box's sides; (batch, height, width) whether there is a box.
    """
    n, _, height, width = scores.shape
    y = (torch.arange(height, device=scores.device) + 0.5) / height
    x = (torch.arange(width, device=scores.device) + 0.5) / width
    kinds = torch.zeros_like(scores)
    distances = scores.new_zeros(n, _SIDES, height, width)
    is_inside = torch.zeros(n, height, width, dtype=torch.bool, device=scores.device)
    for box, label in zip(boxes.unbind(1), labels.unbind(1), strict=True):
        left, top, right, bottom = (side[:, None, None] for side in box.unbind(1))
        sides = (x - left, y[:, None] - top, right - x, bottom - y[:, None])
        own = torch.stack([side.expand(n, height, width) for side in sides], dim=1)
        own = own.to(scores.dtype)
        here = (own > 0).all(dim=1)
        kind = functional.one_hot(label, scores.shape[1]).to(scores.dtype)
        kinds = torch.where(here[:, None], kind[:, :, None, None], kinds)
        distances = torch.where(here[:, None], own, distances)
        is_inside |= here
    return kinds, distances, is_inside
