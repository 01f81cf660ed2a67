"""Networks of the frozen runs. The stored run goes on only while `Small` computes what it does."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.models import create


class Small(nn.Module):
    """Batch norm, dropout and an auxiliary head in 532 parameters."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 4, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 9, num_classes)
        self.aux = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 4)
        logits = self.head(self.drop(x.flatten(1)))
        return (logits, self.aux(x.mean((2, 3)))) if self.training else logits


class Double(nn.Module):
    """A network in float64, its first weights too: where float32 differs from processor to processor in the seventh
    digit, this does in the fifteenth."""

    def __init__(self, of: str, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            self.net = create(of, num_classes=num_classes, in_channels=in_channels)
        finally:
            torch.set_default_dtype(before)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.net(x.double())
