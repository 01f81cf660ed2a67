"""From the `parallel` section of a recipe to a plan for the devices that there are, and what is said of it."""

import torch

from convoy.engine.microbatches import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.training.derived import Derived
from convoy.training.parallel_config import ParallelConfig
from convoy.training.ranks.division import Division, text
from convoy.training.ranks.under_plan import Method
from convoy.training.recipe import Recipe


def plan_of(section: ParallelConfig, num_devices: int) -> tuple[Plan | None, list[str]]:
    """The plan for the devices that there are, and notes on it; None where the planner is to find one.

    Raises:
        ConvoyError: it is no plan, or one for another number of devices.
    """
    notes = []
    plan: Plan | None
    simple = "serial" if num_devices == 1 else f"sample={num_devices}"
    if section.plan is None:
        plan = Plan.parse(simple)
    elif section.plan.strip() == "auto":
        plan = Plan.parse(simple) if num_devices == 1 else None
    else:
        plan = Plan.parse(section.plan, num_devices)
    planned = plan.mesh.num_devices if plan is not None else num_devices
    if planned != num_devices:
        raise ConvoyError(
            f"the plan {plan} is for {planned} device{'s' if planned > 1 else ''}, but {num_devices} "
            f"run{'s' if num_devices == 1 else ''}: change --devices or the sizes in --plan"
        )
    if section.approximate is not None:
        notes.append(
            f"approximate: {section.approximate}, so the result differs from that of one device"
            if num_devices > 1
            else f"no approximation on one device, although the recipe says: {section.approximate}"
        )
    return plan, notes


def method_of(recipe: Recipe) -> Method:
    """How gradients become an update."""
    section = recipe.parallel
    return Method(
        tree=recipe.reproducible,
        compression=torch.bfloat16 if section.gradient_compression == "bf16" else None,
        local_updates=section.local_sgd,
    )


def describe(section: ParallelConfig, plan: Plan, num_devices: int, division: Division) -> list[Derived]:
    """Rows for the log and the report about devices and plan."""
    if num_devices == 1:
        return []
    parts = len(division.counts)
    even = microbatch_sizes(len(division.sizes), parts)
    if section.shares is None:
        shared = "as even as can be" if division.counts == even else "by the speeds that the planner measured"
    else:
        shared = "measured" if section.shares == "auto" else "in the shares given"
    rows = [Derived("devices", num_devices, f"plan {plan}", "no part of the experiment: docs/numerics.md")]
    if parts > 1:
        rows.append(
            Derived(
                "microbatches of each part",
                text(division.counts),
                f"{len(division.sizes)} over {parts}, {shared}",
                "each computes its own samples; the sum is that of one device",
            )
        )
    if section.approximate is not None:
        rows.append(Derived("approximate", section.approximate, "as said", "the result depends on the devices"))
    return rows
