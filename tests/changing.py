"""Networks whose code is another in each test, as CHANGES says."""

from typing import Any

from torch import Tensor, nn

CHANGES: dict[str, Any] = {}


class Changing(nn.Module):
    """Its code differs from one test to the next."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = CHANGES.get("act", nn.SiLU)()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, num_classes)
        self.conv.requires_grad_(not CHANGES.get("frozen"))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.act(self.norm(self.conv(x))).mean((2, 3))))
