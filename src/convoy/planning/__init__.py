"""The planner at work: measures the devices at hand, searches for the fastest plan, and explains it."""

from convoy.planning.planner import Planned, Scored, make_plan, score
from convoy.planning.ranks import Ranks
from convoy.planning.workload import Workload, workload_of

__all__ = ["Planned", "Ranks", "Scored", "Workload", "make_plan", "score", "workload_of"]
