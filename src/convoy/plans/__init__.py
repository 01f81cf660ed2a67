"""Which part of every layer's work each device does, and what must be sent between layers for it."""

from convoy.plans.layout import Layout, Split
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.transfer import Step, transfer

__all__ = ["Layout", "Mesh", "Plan", "Split", "Step", "transfer"]
