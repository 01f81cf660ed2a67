"""Which plans a network and its devices can have, and how a plan is fitted to others."""

from typing import Any

import pytest
from torch import nn

from convoy.errors import ConvoyError
from convoy.plans.fit import across, check_devices, check_patterns, fit, note_on_hosts
from convoy.plans.mesh import Mesh
from convoy.plans.place import COMPUTE
from convoy.plans.plan import Plan
from plans.made_graph import chain, in_stages, placed, small_net

TWO_AXES = {"mesh": {"node": 2, "gpu": 5}, "layers": {"*": {"node": "filter", "gpu": "filter"}}}
LAYERS = [call.layer for call in small_net().calls if call.op in COMPUTE]


def grouped(channels: int, groups: int) -> Any:
    stem, block = nn.Conv2d(4, channels, 3), nn.Conv2d(channels, channels, 3, groups=groups)
    return chain((8, 4, 9, 9), stem=stem, block=block)


def one_dimension() -> Any:
    return chain((8, 4, 9), a=nn.Conv1d(4, 4, 3), signal=nn.Conv1d(4, 4, 3, stride=3))


def test_what_a_layer_cannot_be_divided_into_is_refused_by_its_name_and_its_axis() -> None:
    for graph, plan, *words in (
        (small_net(), "filter=9", "layer 'features.0'", "8 output channels", "9 ranks of axis filter", "at most 8"),
        (small_net(), TWO_AXES, "layer 'features.0'", "10 ranks of axes node·gpu", "at most 8"),
        (small_net(), "channel=4", "layer 'features.0'", "3 input channels", "at most 3", "replicate on it in a YAML"),
        (small_net(), "height=9", "layer 'features.2'", "8 output rows", "larger images"),
        (small_net(), "width=9", "layer 'features.2'", "8 output columns", "axis width"),
        (small_net(32), "owt=11", "layer 'classifier.2'", "10 output channels", "11 ranks of axis owt"),
        (grouped(6, 2), "filter=3", "layer 'block'", "2 groups", "3 ranks of axis filter"),
        (grouped(6, 3), "channel=4", "layer 'block'", "3 groups", "at most 3"),
        (grouped(6, 6), "filter=7", "layer 'stem'", "6 output channels"),
        (one_dimension(), "height=4", "layer 'signal'", "2 output", "axis height"),
    ):
        with pytest.raises(ConvoyError) as caught:
            placed(graph, plan)  # type: ignore[arg-type]
        sentence = str(caught.value)
        assert all(part in sentence for part in words), sentence  # type: ignore[operator]
        assert "\n" not in sentence and len(sentence) < 300


def test_up_to_that_it_is_divided() -> None:
    for plan in ("serial", "filter=8", "channel=3", "height=8", "sample=8", "sample=3,height=5,width=2", "owt=7"):
        placed(small_net(), plan)
    for groups, plan in ((3, "filter=2"), (6, "filter=4"), (6, "channel=4"), (1, "channel=2,filter=2")):
        placed(grouped(6, groups), plan)


def test_a_pattern_that_matches_nothing_is_told_the_nearest_that_does() -> None:
    def check(pattern: str, layers: list[str] = LAYERS, *modules: list[str]) -> None:
        layer = {pattern: {"gpu": "filter"}, "*": {"gpu": "sample"}}
        check_patterns(Plan.parse({"mesh": {"gpu": 2}, "layers": layer}), layers, *modules)

    for pattern, words in (
        ("feature.*", "did you mean features.*?"),
        ("classifier", "did you mean classifier.*?"),
        ("classifer.0", "did you mean classifier.0?"),
        ("Features.*", "did you mean features.*?"),
        ("zzz", "its layers are features, classifier"),
    ):
        with pytest.raises(ConvoyError) as caught:
            check(pattern)
        assert f"pattern {pattern} matches no layer" in str(caught.value) and words in str(caught.value)
    check("aux.*", LAYERS, ["", "features", "features.0", "aux", "aux.conv"])  # which this graph does not call
    with pytest.raises(ConvoyError, match=r"did you mean features\.\*\?"):  # a container has no work of its own
        check("features", LAYERS, ["", "features", "features.0", "features.2", "classifier.0"])
    check_patterns(Plan.parse("sample=2"), [])


def test_stages_begin_at_layers_that_are_called_one_after_another() -> None:
    modules = ["", "features", *(f"features.{number}" for number in range(4)), "classifier", *LAYERS]
    for stages in (["features.2"], ["features", "classifier"], ["features.0", "features.1"], []):
        check_patterns(Plan.parse({"mesh": {"stage": 2}, "stages": stages}), LAYERS, modules)
    for stages, words in (
        (["features.0", "clasifier.0"], "the network has no layer clasifier.0: did you mean classifier."),
        (["feature", "classifier"], "the network has no layer feature: did you mean features."),
        (["head"], "the network has no layer head: a stage can begin at features.0"),
    ):
        with pytest.raises(ConvoyError, match=f"^stages: {words}"):
            check_patterns(Plan.parse({"mesh": {"stage": 2}, "stages": stages}), LAYERS)
    for stages, words in (
        (["features"], "features is where the network begins, and with it the first stage: begin stage 2 at a"),
        (["classifier", "features.2"], "features.2 begins stage 3, but is not called after classifier, where"),
        (["conv9"], "the network calls no layer conv9: a stage can begin at features.0, features.1, features.2, "),
    ):
        with pytest.raises(ConvoyError, match=f"^stages: {words}"):
            in_stages(small_net(), {"mesh": {"stage": len(stages) + 1}, "stages": stages})


def test_a_mesh_needs_as_many_devices_as_there_are() -> None:
    check_devices(Mesh(("sample",), (4,)), 4)
    check_devices(Mesh((), ()), 1)
    for mesh, devices, words in (
        (Mesh(("sample", "filter"), (2, 3)), 4, "sample=2 × filter=3 needs 6 devices, but there are 4: .*--devices 6"),
        (Mesh(("sample",), (2,)), 1, "needs 2 devices, but there is 1: .*product is 1"),
        (Mesh((), ()), 2, "one device needs 1 device, but there are 2"),
    ):
        with pytest.raises(ConvoyError, match=words):
            check_devices(mesh, devices)


FITTED = {  # the plan of more or fewer devices, and how often a layer is divided but by samples, before and after
    ("sample=4", 3): ("sample=3", (1, 1)),
    ("owt=4", 3): ("owt=3", (4, 3)),
    ("filter=2,sample=4", 6): ("filter=2,sample=3", (2, 2)),
    ("sample=2,filter=4", 6): ("sample=2,filter=3", (4, 3)),
    ("sample=2,filter=2", 3): ("sample=3,filter=1", (2, 1)),
    ("sample=2,height=2,width=2", 6): ("sample=3,height=2,width=1", (4, 2)),
    ("sample=2,sample=3", 4): ("sample=4,sample=1", (1, 1)),
    ("height=2,width=2", 8): ("sample=2,height=2,width=2", (4, 4)),
    ("sample=4,stage=2", 2): ("sample=1,stage=2", (2, 2)),
    ("stage=2,sample=2", 3): ("stage=1,sample=3", (2, 1)),
    ("stage=4,filter=2", 4): ("stage=2,filter=2", (8, 4)),
    ("filter=2,stage=2", 8): ("sample=2,filter=2,stage=2", (4, 4)),
    ("stage=2", 1): ("stage=1", (2, 1)),
    ("stage=2", 4): ("stage=2,sample=2", (2, 2)),
    ("stage=2", 3): ("stage=3", (2, 3)),
}


def test_samples_take_up_the_difference_where_a_plan_gets_other_devices() -> None:
    for (plan, devices), (text, groups) in FITTED.items():
        result = fit(Plan.parse(plan), devices)
        assert (str(result.plan), result.groups, result.plan.mesh.num_devices) == (text, groups, devices), plan
    layers = {"features.*": {"node": "sample", "gpu": "filter"}, "classifier.*": {"node": "filter", "gpu": "filter"}}
    result = fit(Plan.parse({"mesh": {"node": 2, "gpu": 2}, "layers": layers}), 2)
    assert result.regrouped and result.plan.to_dict() == {"mesh": {"node": 2, "gpu": 1}, "layers": layers}
    named = {"mesh": {"stage": 2, "sample": 2}, "layers": {"*": {"sample": "sample"}}, "stages": ["layer3"]}
    for devices, mesh, stages in ((6, (2, 3), ["layer3"]), (3, (1, 3), None)):  # as long as their number stays
        again = fit(Plan.parse(named), devices).plan
        assert (again.mesh.sizes, again.to_dict().get("stages")) == (mesh, stages)
    again = fit(Plan.parse({"mesh": {"stage": 2}, "stages": ["conv1", "layer3"]}), 4).plan
    assert again.to_dict() == named | {"stages": ["conv1", "layer3"]}


def test_the_last_axis_lies_inside_hosts_and_a_better_order_is_told() -> None:
    for sizes, per_host, outside in (
        ((2, 2), 2, ("a",)),
        ((2, 2), 4, ()),
        ((2, 2), 1, ("a", "b")),
        ((4, 2), 4, ("a",)),
        ((2, 4), 2, ("a", "b")),
        ((2, 3), 2, ("a", "b")),
    ):
        assert across(Mesh(("a", "b"), sizes), per_host) == outside
    inside, outside_ = "as {} it would lie inside them", "would lie across them as {}"
    for plan, per_host, instead, end in (
        ("filter=2,sample=2", 2, "sample=2,filter=2", inside),
        ("height=2,sample=4", 4, "sample=4,height=2", inside),
        ("sample=2,filter=2,stage=2", 2, "stage=2,sample=2,filter=2", inside),
        ("sample=2,stage=2", 2, "stage=2,sample=2", outside_),
        ("sample=2,filter=2,stage=2", 4, "stage=2,sample=2,filter=2", outside_),
    ):
        (note,) = note_on_hosts(Plan.parse(plan), per_host)
        assert f"of {plan} " in note and note.endswith(end.format(instead)), note
    for plan, per_host in (
        *(("sample=2,filter=2", 2), ("filter=2,sample=2", 4), ("filter=2,sample=2", 1), ("filter=4", 2)),
        *(("filter=2,height=2", 2), ("filter=2,sample=3", 4), ("stage=2,sample=2", 2), ("sample=2,stage=2", 4)),
    ):
        assert note_on_hosts(Plan.parse(plan), per_host) == []
    named = {"mesh": {"sample": 2, "stage": 2}, "layers": {"*": {"sample": "sample"}}, "stages": ["layer3"]}
    assert note_on_hosts(Plan.parse(named), 2)[0].endswith("as stage=2,sample=2; stages begin at layer3")
