"""The explanation says what every layer does, what is sent for it, and what each rank holds; what couples samples."""

from typing import Any

import torch.nn.functional as F
from torch import nn

from convoy.engine.coupling import coupling
from convoy.ops.memory import memory_in_stages
from convoy.plans.explain import explain
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from plans.made_graph import Does, chain, in_stages, small_net

STAGED = """\
plan stage=2,sample=2; stages begin at classifier
training, 8 samples (4 + 4), 4 ranks

stage  layer         work    strategy  gives                sent for its input  forward  backward  gradients  parameters
1      features.0    conv    sample    samples over sample  -                         -         -      896 B       896 B
1      features.2    conv    sample    samples over sample  -                         -         -     3.5 kB      3.5 kB
2      classifier.0  linear  sample    samples over sample  -                         -         -    61.5 kB     61.5 kB
2      classifier.2  linear  sample    samples over sample  -                         -         -      840 B       840 B

stage  begins at     ranks  takes the output of            forward  backward  parameters  activations
1      features.0    0, 1   -                                    -         -      4.4 kB      57.3 kB
2      classifier.0  2, 3   flatten in the network itself  12.3 kB   12.3 kB     62.4 kB      12.6 kB

4 other calls follow the layout given, without sending anything
activations are GPipe's, of all parts of a pass; 1F1B keeps at most those of 2 parts in stage 1, down to 1 in stage 2
a rank sends 12.3 kB in the forward pass, 12.3 kB in the backward pass, 62.4 kB for gradients of parameters
a rank of stage 2 holds most in all: 62.4 kB of 66.8 kB of parameters, \
62.4 kB of gradients, 12.6 kB of activations kept for the backward pass
"""


def test_a_plan_with_stages_is_explained_layer_by_layer() -> None:
    plan = Plan(Mesh(("stage", "sample"), (2, 2)), (("*", {"sample": "sample"}),), ("classifier",))
    placement, staged = in_stages(small_net(), plan)
    assert explain(placement, memory_in_stages(placement, staged), plan, "", staged) == STAGED


COUPLED = {
    "mean": lambda x: x - x.mean(0),
    "amax": lambda x: x - x.amax(0),
    "flip": lambda x: x + x.flip(0),
    "matmul": lambda x: x + (x @ x.t()) @ x,
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "group_norm": lambda x: F.group_norm(x.t()[None], 4)[0].t(),
}
APART = lambda x: F.normalize(F.layer_norm(x - x.mean(1, keepdim=True), (4,))).t().contiguous().t()  # noqa: E731


def test_calls_that_compute_with_several_samples_are_known() -> None:
    def result(function: Any) -> Any:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return coupling(chain((4, 3, 8, 8), conv=nn.Conv2d(3, 4, 3), head=head, between=Does(function)))

    for name, function in COUPLED.items():
        call = result(function)
        assert (call.layer, call.function.__name__) == ("between", name)
    assert not result(APART)
