import pytest
import torch
from torch import nn

from convoy.graph import capture
from convoy.graph.counts import Work, flops, summary, total, work
from convoy.models import create
from convoy.models.counting import count


@pytest.mark.parametrize("name", ["alexnet", "alexnet-2012", "googlenet", "resnet50", "squeezenet1_1", "vgg11_bn"])
def test_the_totals_are_those_of_the_whole_network(name: str) -> None:
    with torch.device("meta"):
        model = create(name)
    whole = total(capture(model, ((1, 3, 224, 224),), training=False))
    expected = count(model, (3, 224, 224))
    assert whole.flops == expected.flops
    assert total(capture(model, ((1, 3, 224, 224),), training=True)).parameters == expected.parameters


class Mixture(nn.Module):
    """Grouped, strided and transposed convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(12, 6, 4, stride=2, padding=1, groups=2)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.grouped(x)).flatten(2)
        return self.fc(x @ x.mT) + torch.einsum("bij,bkj->bik", x, x)[..., :5]


def test_grouped_and_transposed_convolutions_and_products_count_as_in_torch() -> None:
    assert total(capture(Mixture(), ((2, 8, 10, 10),))).flops == count(Mixture(), (8, 10, 10)).flops * 2


def test_a_call_counts_bytes_of_activations_and_numbers_of_parameters() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), ((2, 3, 6, 6),))
    assert work(graph, graph.calls[0]) == Work(2 * 2 * 16 * 4 * 27, 2 * 3 * 36 * 4, 2 * 4 * 16 * 4, 4 * 27 + 4)
    assert flops(graph, graph.calls[1]) == 0
    assert total(graph).parameters == 4 * 27 + 4


def test_the_summary_names_every_call_and_the_totals() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), ((2, 3, 6, 6),))
    assert summary(graph).splitlines() == [
        "call   op    output   MFLOP  MB out  parameters",
        "0      conv  2x4x4x4    0.0    0.00         112",
        "total                   0.0    0.00         112",
    ]
