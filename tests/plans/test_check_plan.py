"""Plans that a network cannot have: the sentence names the layer, the axis and the way out."""

import pytest

from convoy.errors import ConvoyError
from convoy.plans.fit import axis_names, check_devices, check_patterns, check_size
from convoy.plans.mesh import Mesh
from convoy.plans.place import COMPUTE
from convoy.plans.plan import Plan
from plans.made_graph import Chain, in_stages, placed, small_net

TWO_AXES = {"mesh": {"node": 2, "gpu": 5}, "layers": {"*": {"node": "filter", "gpu": "filter"}}}
LAYERS = [call.layer for call in small_net().calls if call.op in COMPUTE]


def _grouped(channels: int, groups: int) -> Chain:
    return Chain(8, 4, 9, 9).conv("stem", channels).conv("block.grouped", channels, groups=groups)


@pytest.mark.parametrize(
    ("graph", "plan", "words"),
    [
        (small_net(), "filter=9", ["layer 'features.0'", "8 output channels", "9 ranks of axis filter", "at most 8"]),
        (small_net(), TWO_AXES, ["layer 'features.0'", "10 ranks of axes node·gpu", "at most 8"]),
        (small_net(), "filter=12", ["layer 'features.0'", "axis filter"]),
        (small_net(), "channel=4", ["layer 'features.0'", "3 input channels", "axis channel", "at most 3"]),
        (small_net(), "height=9", ["layer 'features.2'", "8 output rows", "9 ranks of axis height", "larger images"]),
        (small_net(), "width=9", ["layer 'features.2'", "8 output columns", "axis width"]),
        (small_net(32), "owt=11", ["layer 'classifier.2'", "10 output channels", "11 ranks of axis owt"]),
        (_grouped(6, 2).graph(), "filter=3", ["layer 'block.grouped'", "2 groups", "3 ranks of axis filter"]),
        (_grouped(6, 3).graph(), "channel=4", ["layer 'block.grouped'", "3 groups", "axis channel", "at most 3"]),
        (_grouped(6, 6).graph(), "filter=7", ["layer 'stem'", "6 output channels"]),
        (
            Chain(8, 4, 9).conv("a", 4).conv("signal", 4, stride=3).graph(),
            "height=4",
            ["layer 'signal'", "3 output", "axis height"],
        ),
    ],
)
def test_what_cannot_be_divided(graph, plan, words):
    with pytest.raises(ConvoyError) as caught:
        placed(graph, plan)
    sentence = str(caught.value)
    for part in words:
        assert part in sentence
    assert "\n" not in sentence
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("graph", "plan"),
    [
        (small_net(), "serial"),
        (small_net(), "filter=8"),
        (small_net(), "channel=3"),
        (small_net(), "height=8"),
        (small_net(), "sample=8"),
        (small_net(), "sample=3,height=5,width=2"),
        (small_net(), "owt=7"),
        (small_net(), "replicate=64"),
        (_grouped(6, 3).graph(), "filter=2"),
        (_grouped(6, 6).graph(), "filter=4"),
        (_grouped(6, 6).graph(), "channel=4"),
        (_grouped(6, 1).graph(), "channel=2,filter=2"),
    ],
)
def test_what_can_be_divided(graph, plan):
    placed(graph, plan)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("feature.*", "did you mean features.*?"),
        ("classifier", "did you mean classifier.*?"),
        ("classifer.0", "did you mean classifier.0?"),
        ("Features.*", "did you mean features.*?"),
        ("zzz", "its layers are features, classifier"),
    ],
)
def test_patterns_that_match_nothing(pattern, words):
    plan = Plan.parse({"mesh": {"gpu": 2}, "layers": {pattern: {"gpu": "filter"}, "*": {"gpu": "sample"}}})
    with pytest.raises(ConvoyError) as caught:
        check_patterns(plan, LAYERS)
    assert f"pattern {pattern} matches no layer" in str(caught.value)
    assert words in str(caught.value)


def test_a_pattern_may_match_a_module_that_this_graph_does_not_call():
    plan = Plan.parse({"mesh": {"gpu": 2}, "layers": {"aux.*": {"gpu": "filter"}, "*": {"gpu": "sample"}}})
    check_patterns(plan, LAYERS, ["", "features", "features.0", "aux", "aux.conv"])
    with pytest.raises(ConvoyError):
        check_patterns(plan, ["", "features"])


def test_a_pattern_of_a_container_only_would_be_without_effect():
    plan = Plan.parse({"mesh": {"gpu": 2}, "layers": {"features": {"gpu": "filter"}, "*": {"gpu": "sample"}}})
    with pytest.raises(ConvoyError, match=r"did you mean features\.\*\?"):
        check_patterns(plan, LAYERS, ["", "features", "features.0", "features.2", "classifier.0"])


def test_a_network_without_submodules_has_the_pattern_of_everything():
    check_patterns(Plan.parse("sample=2"), [])
    check_patterns(Plan.parse("sample=2"), [""], [""])


def test_devices():
    check_devices(Mesh(("sample",), (4,)), 4)
    check_devices(Mesh((), ()), 1)
    with pytest.raises(ConvoyError, match=r"sample=2 × filter=3 needs 6 devices, but there are 4: .*--devices 6"):
        check_devices(Mesh(("sample", "filter"), (2, 3)), 4)
    with pytest.raises(ConvoyError, match=r"needs 2 devices, but there is 1: .*product is 1"):
        check_devices(Mesh(("sample",), (2,)), 1)
    with pytest.raises(ConvoyError, match="one device needs 1 device, but there are 2"):
        check_devices(Mesh((), ()), 2)


@pytest.mark.parametrize("strategy", ["filter", "channel"])
def test_channels(strategy):
    for count, channels, groups in [(1, 1, 1), (4, 4, 1), (1, 8, 4), (4, 8, 4), (3, 8, 4)]:
        check_size("layer 'a'", "gpu", count, strategy, channels, groups)
    for count, channels, groups in [(5, 4, 1), (3, 8, 2), (5, 8, 4)]:
        with pytest.raises(ConvoyError, match=r"layer 'a' .*axis gpu.* replicate on it in a YAML plan"):
            check_size("layer 'a'", "gpu", count, strategy, channels, groups)


def test_rows():
    check_size("layer 'a'", "gpu", 3, "height", 3)
    with pytest.raises(ConvoyError, match=r"only 1 output row for the 2 ranks of axis gpu: give it larger images"):
        check_size("layer 'a'", "gpu", 2, "height", 1)
    with pytest.raises(ConvoyError, match=r"only 2 output columns .*at most 2, give it larger images, or"):
        check_size("layer 'a'", "gpu", 3, "width", 2)


def test_axes_by_name():
    assert axis_names(Mesh(("node", "gpu"), (2, 2)), (0, 1)) == "node·gpu"
    assert axis_names(Mesh(("node", "gpu"), (2, 2)), (1,)) == "gpu"


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (["features.0", "clasifier.0"], "the network has no layer clasifier.0: did you mean classifier."),
        (["feature", "classifier"], "the network has no layer feature: did you mean features."),
        (["features.5"], "the network has no layer features.5: did you mean features."),
        (["head"], "the network has no layer head: a stage can begin at features.0"),
    ],
)
def test_stages_that_begin_at_no_layer(stages: list[str], words: str) -> None:
    plan = Plan.parse({"mesh": {"stage": 2}, "stages": stages})
    with pytest.raises(ConvoyError, match=r"^stages: ") as caught:
        check_patterns(plan, LAYERS)
    assert words in str(caught.value)


@pytest.mark.parametrize("stages", [["features.2"], ["features", "classifier"], ["features.0", "features.1"], []])
def test_stages_may_begin_at_layers_without_weights_and_at_containers(stages: list[str]) -> None:
    modules = ["", "features", *(f"features.{number}" for number in range(4)), "classifier", *LAYERS]
    check_patterns(Plan.parse({"mesh": {"stage": 2}, "stages": stages}), LAYERS, modules)


@pytest.mark.parametrize(
    ("number", "stages", "words"),
    [
        (2, ["features"], "features is where the network begins, and with it the first stage: begin stage 2 at a"),
        (3, ["classifier", "features.2"], "features.2 begins stage 3, but is not called after classifier, where"),
        (2, ["conv9"], "the network calls no layer conv9: a stage can begin at features.0, features.1, features.2, "),
    ],
)
def test_stages_that_begin_where_they_cannot(number: int, stages: list[str], words: str) -> None:
    with pytest.raises(ConvoyError, match=r"^stages: ") as caught:
        in_stages(small_net(8), Plan.parse({"mesh": {"stage": number}, "stages": stages}))
    assert words in str(caught.value)
