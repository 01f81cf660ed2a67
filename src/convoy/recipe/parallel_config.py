"""The `parallel` section of a recipe: on how many devices, by which plan. Most of it is no part of the experiment."""

from collections.abc import Collection
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from convoy.errors import ConvoyError
from convoy.plans.compression import Compression
from convoy.plans.fit import check_devices, fit
from convoy.plans.plan import Plan, plan_text
from convoy.plans.schedule import Schedule
from convoy.recipe.schema import Duration, Section, checked
from convoy.units import bytes_of, plural


def _plan(value: object) -> Plan | Literal["auto"]:
    if not isinstance(value, str | Plan):
        raise ValueError(f"{value!r} is no plan: write e.g. sample=4, auto, or the name of a YAML file")
    return "auto" if isinstance(value, str) and value.strip() == "auto" else Plan.parse(value)


# A recipe's text is read once; a file is read where the run begins, and stands in `config.yaml` as a whole.
PlanOrAuto = Annotated[
    Plan | Literal["auto"],
    PlainValidator(_plan, json_schema_input_type=str),
    PlainSerializer(lambda plan: plan_text(plan) if isinstance(plan, Plan) else plan),
]

Shares = Literal["auto"] | tuple[float, ...] | None

# Keys that change where and how fast a run goes, but not its result.
PLACEMENT = ("devices", "plan", "schedule", "shares", "cores_per_device", "memory_limit", "lost_group")


class LostGroupError(ConvoyError):
    """The ranks that there are cannot form the model groups of a plan, and the user wants them to wait for others."""


class AveragingConfig(Section):
    """How the weights of local SGD meet."""

    start: Duration | Literal["decay"] = Field(
        Duration(0, "ba"),
        description="local updates from there on, exact ones before, e.g. 30ep or 50%; decay: once the learning rate "
        "is half of its peak (post-local SGD: Lin et al., 2020)",
    )
    outer_lr: float = Field(1.0, gt=0, description="step from the old weights to the mean of the devices'; 1: to it")
    outer_momentum: float = Field(
        0.0, ge=0, lt=1, description="of these steps, e.g. 0.5 (SlowMo: Wang et al., 2020), or 0.9 with outer_nesterov"
    )
    outer_nesterov: bool = Field(
        False, description="that of Nesterov (DiLoCo: Douillard et al., 2023, with outer_lr=0.7)"
    )
    staleness: int = Field(
        0,
        ge=0,
        description="rounds that a mean may be on its way while devices go on: for slow links, and uneven speed",
    )


class ParallelConfig(Section):
    """Devices and plan; methods that change the result are called approximate."""

    devices: int | None = Field(None, ge=1, description="train on so many devices; not said: those of --plan, or 1")
    plan: PlanOrAuto | None = Field(
        None, description="how to divide the work, e.g. sample=4, stage=2; auto, or a YAML file; not said: sample=N"
    )
    schedule: Schedule | None = Field(
        None,
        description="through stages: 1f1b (least memory), gpipe, zero-bubble (least waiting); the result is the same; "
        "null: 1f1b, or with plan auto the one that is predicted to be fastest",
    )
    shares: Shares = Field(
        None, description="parts of the batch for unequal devices, e.g. 3,3,2, or auto to measure; not said: even"
    )
    cores_per_device: int | None = Field(None, ge=1, description="CPU cores of each; not said: its share of all")
    memory_limit: Annotated[str, BeforeValidator(str), checked(partial(bytes_of, option="the limit"))] | None = Field(
        None,
        description="no plan that needs more on a device, e.g. 2GB; auto takes none that is predicted to, and one that "
        "is given and does is refused; null: what the device has",
    )
    lost_group: Literal["form", "wait"] = Field(
        "form",
        description="where ranks left cannot form a model group: form or wait; smaller groups, or for other ranks",
    )
    gradient_compression: Annotated[str, checked(Compression.parse)] | None = Field(
        None,
        description="approximate: send gradients, or with local_sgd what weights have changed, as bf16, powersgd:RANK "
        "or topk:PART, e.g. topk:0.01; what is left out is sent later; not said: exact",
    )
    local_sgd: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="approximate: average the weights every H updates; not the gradients (Stich, 2019); auto: so often "
        "that it takes at most a fifth of the time, as measured",
    )
    averaging: AveragingConfig = AveragingConfig()

    @property
    def memory_bytes(self) -> float | None:
        """What each device may use; None for all that it has."""
        return None if self.memory_limit is None else bytes_of(self.memory_limit, "parallel.memory_limit")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.shares, tuple) and (not self.shares or min(self.shares) <= 0):
            raise ValueError("parallel.shares must be numbers above zero, one for each part of the batch, e.g. 3,3,2")
        averaging = self.averaging
        if self.local_sgd is None and (changed := averaging.model_dump(exclude_defaults=True)):
            key = f"parallel.averaging.{next(iter(changed))}"
            raise ValueError(f"{key} has no effect without parallel.local_sgd: give both")
        if averaging.outer_nesterov and not averaging.outer_momentum:
            raise ValueError("parallel.averaging.outer_nesterov needs outer_momentum, e.g. 0.9: give both")
        if averaging.staleness and (self.gradient_compression or "").startswith("powersgd"):
            raise ValueError(
                "parallel.averaging.staleness sends while devices compute, but PowerSGD sends twice, the second time "
                "what follows from the first: choose bf16 or topk for gradient_compression"
            )
        return self

    @property
    def compression(self) -> Compression | None:
        return None if self.gradient_compression is None else Compression.parse(self.gradient_compression)

    @property
    def approximate(self) -> str | None:
        """The approximate method, in words; None where everything is exact."""
        compressed = f"sent {self.compression}" if self.compression is not None else ""
        if self.local_sgd is None:
            return f"gradients are {compressed}" if compressed else None
        averaging, every = self.averaging, self.local_sgd
        words = [f"local SGD averages the weights every {'few' if every == 'auto' else every} updates"]
        if averaging.start:
            start = "the learning rate has halved" if averaging.start == "decay" else averaging.start
            words.append(f"exact until {start}")
        if averaging.outer_momentum:
            kind = "Nesterov momentum" if averaging.outer_nesterov else "momentum"
            words.append(f"with an outer {kind} of {averaging.outer_momentum:g}")
        if averaging.outer_lr != 1:
            words.append(f"in steps of {averaging.outer_lr:g}")
        if averaging.staleness:
            words.append(f"up to {plural(averaging.staleness, 'round')} late")
        return ", ".join([*words, *filter(None, [compressed])])

    def approximation(self, plan: Plan) -> str | None:
        """The same, where it has an effect: on devices that all run the same stage."""
        return self.approximate if plan.mesh.num_devices > plan.num_stages else None


def fitted(
    section: ParallelConfig, num_devices: int, keep: Collection[str] = (), notes: list[str] | None = None
) -> ParallelConfig:
    """The section for the devices that there are, with a sentence in `notes` on what was changed; a plan or shares in
    `keep` stay as they are, even if they do not fit. A LostGroupError where the plan's model groups cannot be formed,
    and the section says to wait then.
    """
    plan, shares, notes = section.plan, section.shares, [] if notes is None else notes
    if isinstance(plan, Plan) and "plan" not in keep and plan.mesh.num_devices != num_devices:
        before, plan = plan, None  # one for a single device says nothing of more
        if before.mesh.num_devices > 1:
            plan, group_before, group_after = fit(before, num_devices)
            if group_before != group_after and section.lost_group == "wait":
                raise LostGroupError(
                    f"{num_devices} devices cannot form the model groups of {group_before} of the plan {before}, "
                    "and --lost-group is wait: start as many as the plan is for, or leave --lost-group away"
                )
            notes.append(f"the plan {before} was fitted to {plural(num_devices, 'device')}: {plan}")
    if isinstance(shares, tuple) and "shares" not in keep:
        number, parts = len(shares), plan.parts if isinstance(plan, Plan) else num_devices
        is_open = plan == "auto" and section.devices == num_devices  # any of the planner's choices may have these parts
        if number != parts and not (is_open and number > 1 and num_devices % number == 0):
            text = ",".join(f"{share:g}" for share in shares)
            notes.append(
                f"the shares {text} are for {plural(number, 'part')} of the batch, not {parts}: they are left out"
            )
            shares = None
    return section.model_copy(update={"devices": num_devices, "plan": plan, "shares": shares})


def check_shares(shares: Shares, num_devices: int) -> None:
    """Refuse shares that no plan on so many devices has parts for, whatever the network."""
    if isinstance(shares, tuple) and num_devices % len(shares):
        raise ConvoyError(
            f"--shares names {len(shares)} parts of the batch, into which no plan on {plural(num_devices, 'device')} "
            f"divides it: give {num_devices} numbers"
        )


def num_devices(section: ParallelConfig) -> int:
    """How many devices the section asks for."""
    if section.devices is not None:
        return section.devices
    if isinstance(section.plan, Plan):
        return section.plan.mesh.num_devices
    return len(section.shares) if isinstance(section.shares, tuple) else 1


def plan_of(section: ParallelConfig, num_devices: int) -> tuple[Plan | None, list[str]]:
    """The plan for the devices that there are, and notes on it; None where the planner is to find one. A ConvoyError
    where it is for another number of devices.
    """
    plan = section.plan
    if plan is None or (plan == "auto" and num_devices == 1):
        plan = Plan.by_samples(num_devices)
    if isinstance(plan, Plan):
        check_devices(plan.mesh, num_devices)
    if section.approximate is None:
        return plan if isinstance(plan, Plan) else None, []
    where = "on one device" if num_devices == 1 else "with a device for each stage"
    note = f"approximate: {section.approximate}, so the result differs from that of one device"
    if isinstance(plan, Plan) and section.approximation(plan) is None:
        note = f"no approximation {where}, although the recipe says: {section.approximate}"
    return plan if isinstance(plan, Plan) else None, [note]
