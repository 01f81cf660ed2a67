"""The `parallel` section of a recipe: on how many devices, by which plan. Most of it is no part of the experiment."""

from typing import Literal, Self

from pydantic import Field, model_validator

from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.training.section import Section

PLACEMENT = ("devices", "plan", "shares", "cores_per_device")
"""Keys that change where and how fast a run goes, but not its result."""


class ParallelConfig(Section):
    """Devices and plan; methods that change the result are called approximate."""

    devices: int | None = Field(None, ge=1, description="how many devices; not said: as many as the plan has, or one")
    plan: str | None = Field(
        None, min_length=1, description="e.g. sample=4, auto, or a YAML file; not said: sample=DEVICES"
    )
    shares: Literal["auto"] | tuple[float, ...] | None = Field(
        None, description="parts of the batch, e.g. [3, 3, 2]; auto measures; not said: as even as can be"
    )
    cores_per_device: int | None = Field(None, ge=1, description="CPU cores of each (its share of all, if not said)")
    gradient_compression: Literal["bf16"] | None = Field(
        None, description="approximate: send gradients in this precision"
    )
    local_sgd: int | None = Field(
        None,
        ge=2,
        description="approximate: average the weights, not the gradients, every so many updates (Stich, 2019)",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.shares, tuple) and (not self.shares or min(self.shares) <= 0):
            raise ValueError("parallel.shares must be numbers above zero, one for each device, e.g. 3,3,2")
        if self.gradient_compression is not None and self.local_sgd is not None:
            raise ValueError(
                "parallel.gradient_compression has no effect with local_sgd, which sends no gradients: give one"
            )
        return self

    @property
    def approximate(self) -> str | None:
        """The approximate method, in words; None where everything is exact."""
        if self.gradient_compression is not None:
            return f"gradients are sent in {self.gradient_compression}"
        if self.local_sgd is not None:
            return f"local SGD averages the weights every {self.local_sgd} updates"
        return None


def plan_text(plan: Plan) -> str:
    """A plan as the recipe keeps it: in one line where it has one, else as YAML."""
    try:
        return str(plan) if Plan.parse(str(plan)) == plan else plan.to_yaml()
    except ConvoyError:
        return plan.to_yaml()


def fitted(section: ParallelConfig, num_devices: int, plan_is_new: bool, shares_are_new: bool) -> ParallelConfig:
    """The section for the devices that there are. A plan and shares of before, for another number, are left out."""
    changes: dict[str, object] = {"devices": num_devices}
    if section.plan is not None and section.plan.strip() != "auto":
        plan = Plan.parse(section.plan)
        fits = plan_is_new or plan.mesh.num_devices == num_devices
        changes["plan"] = plan_text(plan) if fits else None
    if not shares_are_new and isinstance(section.shares, tuple) and len(section.shares) != num_devices:
        changes["shares"] = None
    return section.model_copy(update=changes)


def num_devices(section: ParallelConfig) -> int:
    """How many devices the section asks for."""
    if section.devices is not None:
        return section.devices
    if section.plan is not None and section.plan.strip() != "auto":
        return Plan.parse(section.plan).mesh.num_devices
    return len(section.shares) if isinstance(section.shares, tuple) else 1
