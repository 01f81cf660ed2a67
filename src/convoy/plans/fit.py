"""Plans for another number of devices than they were written for."""

import itertools
import math
from dataclasses import dataclass

from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan


@dataclass(frozen=True)
class Fit:
    """A plan as it fits a number of devices.

    Attributes:
        groups: devices of a model group, which compute the same samples together, before and now.
    """

    plan: Plan
    groups: tuple[int, int]

    @property
    def regrouped(self) -> bool:
        """Whether model groups have lost members, or were given others."""
        return self.groups[0] != self.groups[1]


def fit(plan: Plan, num_devices: int) -> Fit:
    """The plan with the sizes of its axes changed so that it is for so many devices.

    Axes on which layers are divided by samples, and by nothing else, take up the difference: `sample=4,filter=2` is
    `sample=3,filter=2` on six devices. Where that does not come out even the model groups become smaller, as little as
    can be: `sample=2,filter=4` is `sample=2,filter=3` on six. The only axis of a plan has all devices, whatever it
    divides.
    """
    mesh = plan.mesh
    by_samples = [
        {given[name] for _, given in plan.layers if name in given} - {"replicate"} == {"sample"} for name in mesh.names
    ]
    if len(mesh.sizes) == 1:
        group = (1, 1) if by_samples[0] else (mesh.num_devices, num_devices)
        return Fit(Plan(Mesh(mesh.names, (num_devices,)), plan.layers), group)
    others = [size for size, is_sample in zip(mesh.sizes, by_samples, strict=True) if not is_sample]
    before = math.prod(others)
    choices = itertools.product(*(range(1, size + 1) for size in others))
    chosen = max((sizes for sizes in choices if num_devices % math.prod(sizes) == 0), key=lambda s: (math.prod(s), s))
    rest, left = num_devices // math.prod(chosen), iter(chosen)
    if not any(by_samples) and rest > 1:
        names = ("sample", *mesh.names)
        layers = tuple((pattern, {"sample": "sample", **given}) for pattern, given in plan.layers)
        return Fit(Plan(Mesh(names, (rest, *chosen)), layers), (before, math.prod(chosen)))
    sizes: list[int] = []
    for size, is_sample in reversed(list(zip(mesh.sizes, by_samples, strict=True))):
        sizes.append(math.gcd(size, rest) if is_sample else 0)
        rest //= sizes[-1] or 1
    sizes.reverse()
    outermost = by_samples.index(True) if any(by_samples) else None
    found = tuple(size if is_sample else next(left) for size, is_sample in zip(sizes, by_samples, strict=True))
    if outermost is not None:
        found = (*found[:outermost], found[outermost] * rest, *found[outermost + 1 :])
    return Fit(Plan(Mesh(mesh.names, found), plan.layers), (before, math.prod(chosen)))
