"""A network whose layers have names that a page must escape."""

from torch import nn


def net(num_classes: int = 4) -> nn.Module:
    """Convolutions and a linear layer in a module called like markup."""
    found = nn.Sequential()
    found.add_module("<b>bold</b>", nn.Conv2d(1, 4, 3, padding=1))
    found.add_module("a & b", nn.Conv2d(4, 4, 3, padding=1))
    found.add_module("flat", nn.Flatten())
    found.add_module("'quoted'", nn.Linear(4 * 12 * 12, num_classes))
    return found
