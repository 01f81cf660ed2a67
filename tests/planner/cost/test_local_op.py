"""Pieces: equal where ranks and blocks do the same, unequal where they do not, and named alike in every process."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.models import create
from convoy.models.counting import count
from convoy.ops import capture, place
from convoy.planner.cost.local import local_op
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.plans.place import Batch
from convoy.plans.plan import Plan
from plans.made_graph import Chain, placed, small_net

CONV = LocalOp(
    "conv",
    "",
    (Operand((8, 3, 16, 16), "float32"), Operand((4, 3, 3, 3), "float32", "parameter", True)),
    (Operand((8, 4, 16, 16), "float32", gradient=True),),
    (("groups", 1), ("padding", ((1, 0, 0), (1, 0, 0))), ("stride", (1, 1)), ("transposed", False)),
)


def local_ops(graph, plan, rank=0):
    placement = placed(graph, plan)
    return {call.call.layer: local_op(call, placement, rank) for call in placement.calls}


def test_keys_are_the_same_in_another_process():
    code = (
        "import json,sys; from convoy.planner.cost.local_op import LocalOp;"
        "print(LocalOp.from_dict(json.loads(sys.stdin.read())).key)"
    )
    text = json.dumps(CONV.to_dict())
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": "src"}
    found = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == CONV.key
    assert CONV.key.startswith("conv-")


def test_a_piece_comes_back_from_json():
    again = LocalOp.from_dict(json.loads(json.dumps(CONV.to_dict())))
    assert again == CONV
    assert hash(again) == hash(CONV)
    assert again.key == CONV.key


@pytest.mark.parametrize(
    "other",
    [
        replace(CONV, op="linear"),
        replace(CONV, inputs=(Operand((9, 3, 16, 16), "float32"), CONV.inputs[1])),
        replace(CONV, inputs=(Operand((8, 3, 16, 16), "bfloat16"), CONV.inputs[1])),
        replace(CONV, inputs=(Operand((8, 3, 16, 16), "float32", gradient=True), CONV.inputs[1])),
        replace(CONV, options=(("groups", 1), ("stride", (2, 2)))),
    ],
)
def test_what_takes_another_time_has_another_key(other):
    assert other.key != CONV.key


def test_blocks_that_repeat_are_one_piece():
    found = local_ops(Chain(8, 4, 9, 9).conv("first", 4).conv("a", 4).relu("r").conv("b", 4).graph(), "sample=2")
    assert found["a"] == found["b"]
    assert found["a"].key == found["b"].key
    assert found["first"] != found["a"]  # which needs no gradient of the images


def test_ranks_with_equal_shares_are_one_piece_and_others_are_not():
    graph = small_net(9)
    first, second = (local_ops(graph, "sample=2", rank)["features.0"] for rank in (0, 1))
    assert (first.inputs[0].shape[0], second.inputs[0].shape[0]) == (5, 4)
    assert local_ops(small_net(8), "sample=2", 0) == local_ops(small_net(8), "sample=2", 1)


def test_borders_pad_and_the_middle_does_not():
    graph = Chain(4, 3, 12, 12).conv("a", 4).graph()
    first, middle, last = (local_ops(graph, "height=3", rank)["a"] for rank in range(3))
    assert first.option("padding") == ((0, 1, 0), (1, 0, 0))
    assert middle.option("padding") == ((0, 0, 0), (1, 0, 0))
    assert last.option("padding") == ((0, 0, 1), (1, 0, 0))
    assert [each.inputs[0].shape[2] for each in (first, middle, last)] == [5, 6, 5]
    assert first.bytes.forward > replace(first, options=middle.options).bytes.forward  # the padding takes a copy


def test_local_groups_are_those_of_the_rank():
    graph = Chain(4, 8, 9, 9).conv("a", 8, groups=4).graph()
    assert local_ops(graph, "filter=2")["a"].option("groups") == 2
    assert local_ops(graph, "serial")["a"].option("groups") == 4


def test_only_one_rank_adds_the_bias_of_a_partial_sum():
    plan = {"mesh": {"x": 2}, "layers": {"c": {"x": "channel"}}}
    graph = Chain(4, 8, 9, 9).conv("c", 8).graph()
    assert [local_ops(graph, plan, rank)["c"].option("bias") for rank in (0, 1)] == [True, False]


def test_flops_and_bytes_of_a_convolution():
    flops = 2 * 8 * 16 * 16 * (4 * 3 * 3 * 3)
    assert CONV.flops == (flops, flops)  # the images need no gradient
    both = replace(CONV, inputs=(replace(CONV.inputs[0], gradient=True), CONV.inputs[1]))
    assert both.flops == (flops, 2 * flops)
    images, weight, output = 8 * 3 * 256 * 4, 108 * 4, 8 * 4 * 256 * 4
    assert CONV.bytes == (images + weight + output, output + weight + images + weight)


def test_flops_of_ranks_add_up_to_those_of_the_call():
    graph = small_net()
    whole = local_ops(graph, "serial")
    for plan in ("sample=2", "filter=2", "owt=4", "sample=2,filter=2"):
        placement = placed(graph, plan)
        for call in placement.calls:
            ranks = [local_op(call, placement, rank).flops.forward for rank in range(placement.mesh.num_devices)]
            assert sum(ranks) == whole[call.call.layer].flops.forward, (plan, call.call.name)


class Mixture(nn.Module):
    """Grouped, strided and transposed convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(12, 6, 4, stride=2, padding=1, groups=2)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.grouped(x)).flatten(2)
        return self.fc(x @ x.mT)


@pytest.mark.parametrize("name", ["", "alexnet-2012", "googlenet", "resnet50", "squeezenet1_1", "vgg11_bn"])
def test_flops_are_those_that_torch_counts(name):
    with torch.device("meta"):
        model = create(name) if name else Mixture()
    shape = (3, 224, 224) if name else (8, 10, 10)
    graph = capture(model, ((1, *shape),), training=False)
    plan = Plan.parse("serial")
    placement = place(graph, plan, Batch(plan.mesh, (), (range(1),)), [])
    found = sum(local_op(call, placement, 0).flops.forward for call in placement.calls)
    assert found == count(model, shape).flops


def test_views_and_empty_parts_take_no_time():
    found = local_ops(small_net(), "serial")
    assert found[""].op == "reshape"
    assert found[""].bytes == (0, 0)
    empty = local_ops(small_net(1), "sample=2", 1)
    assert all(each.is_empty and each.flops == (0, 0) and each.bytes == (0, 0) for each in empty.values())


def test_what_people_read_of_a_piece():
    found = local_ops(small_net(), "serial")
    assert found["features.2"].describe() == "conv 8×8×16×16 → 8×12×8×8, 3×3 /2"
    assert found["features.1"].describe() == "relu 8×8×16×16 → 8×8×16×16"


def test_what_overwrites_its_input_is_another_piece():
    alone = local_ops(Chain(8, 4, 9, 9).conv("a", 4).relu("r").conv("b", 4).graph(), "sample=2")["r"]
    assert alone.option("overwrites") is True
    chain = Chain(8, 4, 9, 9).conv("a", 4)
    source = chain.last
    chain.conv("b", 4)
    chain.last = source
    shared = local_ops(chain.relu("r").graph(), "sample=2")["r"]
    assert shared.option("overwrites") is None
    assert shared.key != alone.key


def test_of_calls_that_take_one_value_all_but_the_last_add_their_gradient():
    chain = Chain(8, 4, 9, 9).conv("a", 4)
    first = chain.last
    chain.conv("b", 4)
    shape = chain.values[first].shape
    chain.call("sum", "elementwise", torch.add, shape, (first, chain.last), {})
    graph = chain.conv("c", 4).graph()
    found = local_ops(graph, "sample=2")
    assert [operand.adds for operand in found["b"].inputs] == [True, False, False]
    assert not any(operand.adds for layer in ("a", "sum", "c") for operand in found[layer].inputs)
    assert found["b"].key != found["c"].key
    assert found["b"].bytes.backward - found["c"].bytes.backward == 3 * found["b"].inputs[0].bytes


def test_arguments_that_json_cannot_say_are_kept_as_text():
    chain = Chain(8, 4, 9, 9).conv("a", 4)
    shape = chain.values[chain.last].shape
    chain.call("m", "elementwise", torch.clamp_min, shape, (chain.last,), {})
    graph = chain.graph()
    last = graph.calls[-1]
    graph = replace(
        graph, calls=(graph.calls[0], replace(last, args=(*last.args, float("-inf"), object(), torch.int8)))
    )
    found = local_ops(graph, "sample=2")["m"]
    assert found.option("called") == (("$0", "-inf", "object", "int8"), ())
    assert LocalOp.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
