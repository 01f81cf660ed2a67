"""The planner: measures the devices at hand, searches for the fastest plan, and explains it."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.planner.cost.step import Scored
    from convoy.planner.planner import Planned, make_plan, score
    from convoy.planner.workload import Workload, workload_of

__all__ = ["Planned", "Scored", "Workload", "make_plan", "score", "workload_of"]


__getattr__ = lazily(
    __name__,
    {
        "cost.step": "Scored",
        "planner": "Planned make_plan score",
        "workload": "Workload workload_of",
    },
)
