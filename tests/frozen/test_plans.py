"""Golden plans: what the planner finds and predicts from costs that no machine has measured."""

from functools import cache

import pytest
import torch

from convoy.hardware.catalog import Hop
from convoy.models import create
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, Roofline, Update
from convoy.planner.cost.link import assumed
from convoy.planner.planner import propose, score
from convoy.planner.search.layers import ANY, Constraints
from convoy.planner.search.prices import AXIS_STRATEGIES
from convoy.planner.search.search import search
from convoy.planner.workload import Workload, workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from frozen.golden import golden, unlike
from planner.search.nets import additive_seconds

NETWORKS = {"alexnet": 96}  # pixels of the images
NETWORKS |= dict.fromkeys(("vgg11", "resnet18", "resnet50", "googlenet", "densenet121", "squeezenet1_1"), 64)
BATCH = 32
SLOW_CORE = Costs(
    Calibrated({}),  # nothing is measured: a slow core by its roofline
    assumed(Hop(5e-5, 1e9), overlap=True, cpu_share=0.5),
    Update(per_byte=1e-10, per_tensor=1e-5, state=1.0),
)
GPU = Costs(
    Roofline(flops_per_s=2e12, bytes_per_s=2e11, overhead_s=5e-6),
    assumed(Hop(2e-5, 4e9), Hop(1e-5, 2e10), per_host=2),
    Update(per_byte=1e-11, per_tensor=1e-5, state=1.0),
    on_cpu=False,
)
MESHES = {  # with whose costs, and among which strategies
    "2": (Mesh(("gpu",), (2,)), SLOW_CORE, AXIS_STRATEGIES),
    "4": (Mesh(("gpu",), (4,)), GPU, AXIS_STRATEGIES),
    "2x2": (Mesh(("node", "gpu"), (2, 2)), GPU, ("sample", "replicate", "filter", "channel")),
}
GIVEN = ("filter=2", "owt=4", "height=2,sample=2", "stage=2", "stage=2,sample=2")
SLOW = ("resnet50", "googlenet", "densenet121")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NETWORKS]


@cache
def workload(network: str) -> Workload:
    with torch.device("meta"):
        model = create(network)
    images = torch.empty(1, 3, NETWORKS[network], NETWORKS[network])
    return workload_of(model, images, BATCH, name=network, batch_norm="microbatch", microbatch=4)


def predicted(network: str, plan: Plan, costs: Costs) -> dict[str, object]:
    """What is said of a plan."""
    found = score(workload(network), plan, costs, passes=8)
    return {"seconds": found.seconds, "memory": found.memory.total, "passes": found.passes}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("network", EACH)
def test_the_plan_that_is_found(network: str, mesh: str) -> None:
    """Where another plan is found its regret is said: how much longer it takes by the predictions of today."""
    (on, costs, among), job = MESHES[mesh], workload(network)
    sums = Additive(costs, job.graph, job.passes)
    best = search(job, on.num_devices, costs, Constraints(meshes=[on], strategies=among)).best
    plan = best.plan
    now = {"plan": plan.to_yaml().splitlines(), "sum": best.seconds, **predicted(network, plan, costs)}
    stored = golden("plans.json", f"{network} on {mesh}", now)
    if now["plan"] != stored["plan"]:
        before = Plan.parse("\n".join(stored["plan"]))
        regret = now["seconds"] / predicted(network, before, costs)["seconds"] - 1
        in_sum = now["sum"] / additive_seconds(job.place(before), sums) - 1
        pytest.fail(f"another plan, {regret:+.2%} predicted, {in_sum:+.2%} in the sum: {plan}, not {before}")
    assert unlike(now, stored) == []


@pytest.mark.parametrize("network", EACH)
def test_the_predictions_of_given_plans(network: str) -> None:
    now = {text: predicted(network, Plan.parse(text), GPU if "4" in text else SLOW_CORE) for text in GIVEN}
    assert unlike(now, golden("plans.json", f"{network}, given", now)) == []


@pytest.mark.parametrize("network", ["vgg11", "resnet18"])
def test_the_cuts_that_are_found(network: str) -> None:
    proposals = propose(workload(network), 2, SLOW_CORE, ANY, [])
    now = [[str(plan), *plan.stages, passes] for plan, passes in proposals if plan.num_stages > 1]
    assert unlike(now, golden("plans.json", f"{network} in stages", now)) == []
