"""A rank's part of a tensor lies in memory as the whole one does."""

import itertools

import torch
import torch.nn.functional as F

from convoy.engine.shards import cut
from convoy.plans.layout import Layout, Split, balanced
from convoy.plans.mesh import Mesh

MESH = Mesh(("gpu",), (2,))


def test_a_convolution_by_a_part_keeps_its_images_as_they_are():
    for dim, kernel, memory_format in itertools.product((0, 1), (1, 3), (torch.contiguous_format, torch.channels_last)):
        weight = torch.randn(8, 6, kernel, kernel).to(memory_format=memory_format)
        layout = Layout.of({dim: Split((0,), balanced(weight.shape[dim], 2))})
        part = cut(weight, layout, MESH, (1,))
        images = torch.randn(2, part.shape[1], 5, 5).to(memory_format=memory_format)
        assert F.conv2d(images, part).is_contiguous(memory_format=memory_format)
        assert torch.equal(part, weight.chunk(2, dim)[1])


def test_depthwise_filters_keep_their_strides():
    for memory_format in (torch.contiguous_format, torch.channels_last):
        weight = torch.randn(8, 1, 3, 3).to(memory_format=memory_format)
        layout = Layout.of({0: Split((0,), balanced(8, 2))})
        assert cut(weight, layout, MESH, (0,)).stride() == weight.stride()
