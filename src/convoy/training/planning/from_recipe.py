"""From the `parallel` section of a recipe to a plan for the devices that there are, and what is said of it."""

import torch

from convoy.engine.microbatches import microbatch_sizes
from convoy.plans.plan import Plan
from convoy.training.derived import Derived
from convoy.training.parallel_config import ParallelConfig
from convoy.training.ranks.division import Division, text
from convoy.training.ranks.under_plan import Method
from convoy.training.recipe import Recipe


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
