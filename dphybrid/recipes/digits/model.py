"""Image classifiers, loss inside the region: a small convolutional network, and a capsule network (Sabour,
Frosst, Hinton 2017).

Letters: B samples, C channels, H height, W width, I input capsules, J output capsules (classes), D width of
an input capsule, E width of an output capsule.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dphybrid.parallel import DataParallel, Dropout
from dphybrid.recipes.context import ModelContext
from dphybrid.recipes.digits import DigitsModelConfig

_CAPSULE, _DIGIT_CAPSULE = 8, 16
"""Widths of input and output capsules, as in the paper."""
_ROUTINGS = 3
_RECONSTRUCTION = 0.0005
"""Weight of the summed squared error of the redrawn image, as in the paper."""


class _ConvRegion(nn.Module):
    """(x_BCHW, labels_B) -> (loss_B, logits_BJ): two convolutions, a pooling, two linear layers,
    cross-entropy."""

    def __init__(self, image: tuple[int, int, int], num_classes: int, hidden: int, dropout: float) -> None:
        super().__init__()
        channels, height, width = image
        self.network = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), Dropout(dropout),
            nn.Linear(64 * (height // 2) * (width // 2), hidden), nn.ReLU(), Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, x_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        logits_BJ = self.network(x_BCHW)
        return F.cross_entropy(logits_BJ, labels_B, reduction="none"), logits_BJ


def squash(vectors: Tensor) -> Tensor:
    """Shorten vectors (..., D) to a length below 1 that says how sure they are; the paper's equation 1."""
    square = vectors.square().sum(-1, keepdim=True)
    return vectors * (square + 1e-12).sqrt() / (1 + square)  # the root of 0 has no slope


class DigitCapsules(nn.Module):
    """capsules_BID -> capsules_BJE by routing: an input capsule sends its vote to where the others' votes
    agree with it."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight_IJED = nn.Parameter(0.05 * torch.randn(num_inputs, num_outputs, _DIGIT_CAPSULE, _CAPSULE))

    def forward(self, capsules_BID: Tensor) -> Tensor:
        votes_BIJE = torch.einsum("ijed,bid->bije", self.weight_IJED, capsules_BID)
        agreement_BIJ = votes_BIJE.new_zeros(votes_BIJE.shape[:3])
        for routing in range(_ROUTINGS):
            share_BIJ = agreement_BIJ.softmax(2)
            last = routing == _ROUTINGS - 1
            # Only the last sum is trained through: the shares are an inference of their own.
            capsules_BJE = squash(
                torch.einsum("bij,bije->bje", share_BIJ, votes_BIJE if last else votes_BIJE.detach())
            )
            if not last:
                agreement_BIJ = agreement_BIJ + torch.einsum(
                    "bije,bje->bij", votes_BIJE.detach(), capsules_BJE
                )
        return capsules_BJE


class _CapsuleRegion(nn.Module):
    """(x_BCHW, labels_B) -> (loss_B, logits_BJ): margin loss on the lengths, plus what it costs to redraw the
    image from its capsule."""

    def __init__(self, image: tuple[int, int, int], num_classes: int, hidden: int) -> None:
        super().__init__()
        channels, height, width = image
        self.enter = nn.Conv2d(channels, 64, 3)
        self.primary = nn.Conv2d(64, 8 * _CAPSULE, 3, stride=2)
        rows, columns = ((side - 2 - 3) // 2 + 1 for side in (height, width))
        self.digits = DigitCapsules(8 * rows * columns, num_classes)
        self.redraw = nn.Sequential(
            nn.Linear(num_classes * _DIGIT_CAPSULE, hidden),
            nn.ReLU(),
            nn.Linear(hidden, channels * height * width),
            nn.Sigmoid(),
        )

    def forward(self, x_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        primary_BCHW = self.primary(self.enter(x_BCHW).relu())
        capsules_BID = squash(primary_BCHW.unflatten(1, (-1, _CAPSULE)).movedim(2, -1).flatten(1, 3))
        capsules_BJE = self.digits(capsules_BID)
        length_BJ = capsules_BJE.square().sum(2).add(1e-12).sqrt()
        is_class_BJ = F.one_hot(labels_B, length_BJ.shape[1]).to(length_BJ)
        margin_BJ = (
            is_class_BJ * (0.9 - length_BJ).relu().square()
            + 0.5 * (1 - is_class_BJ) * (length_BJ - 0.1).relu().square()
        )
        redrawn_BX = self.redraw((capsules_BJE * is_class_BJ[:, :, None]).flatten(1))
        redraw_B = (redrawn_BX - x_BCHW.flatten(1)).square().sum(1)
        return margin_BJ.sum(1) + _RECONSTRUCTION * redraw_B, length_BJ


class _ImageModel(nn.Module):
    """Hands images and labels to the region."""

    def __init__(self, region: DataParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = region
        self.dtype = dtype

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        loss_B, logits_BJ = self.region(batch["x_BCHW"].to(self.dtype), batch["labels_B"])
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "logits": logits_BJ}


def build_digits(context: ModelContext[DigitsModelConfig]) -> _ImageModel:
    o, num_classes = context.options, int(context.info["num_classes"])
    channels, height, width = context.info["image"]
    image = (int(channels), int(height), int(width))
    capsule = o.kind == "capsule"
    region = (
        _CapsuleRegion(image, num_classes, o.hidden)
        if capsule
        else _ConvRegion(image, num_classes, o.hidden, o.dropout)
    )
    return _ImageModel(DataParallel(region, context.devices), context.dtype)
