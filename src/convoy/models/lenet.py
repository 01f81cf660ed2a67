"""LeNet-5: the network that reads digits.

LeCun, Bottou, Bengio, Haffner: Gradient-Based Learning Applied to Document Recognition (1998), figure 2. The layers and
their sizes are the paper's; ReLU, max pooling and a linear output stand where it has tanh, trainable averages and
radial basis functions, as in most LeNets today. C3 sees all maps of S2, of which the paper chose a few for each of its
maps: 61,706 parameters.
"""

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError


class LeNet(nn.Module):
    """Images [N, C, S, S] with S = `image_size` to logits [N, num_classes].

    The paper's images are 32x32; digits of 28x28 are padded to that size by the first convolution.
    Raises ConvoyError for an `image_size` other than 28 and 32.
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        if image_size not in (28, 32):
            raise ConvoyError(
                f"lenet reads images of 28x28 or 32x32 pixels, not {image_size}x{image_size}: --image-size 32"
            )
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5, padding=2 if image_size == 28 else 0),  # C1: 6 maps of 28x28
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),  # S2: 14x14
            nn.Conv2d(6, 16, kernel_size=5),  # C3: 16 maps of 10x10
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),  # S4: 5x5
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),  # C5: a 5x5 convolution of 5x5 maps, that is, a fully connected layer
            nn.ReLU(inplace=True),
            nn.Linear(120, 84),  # F6
            nn.ReLU(inplace=True),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits
