"""Starts the processes of a run, one for each device, or finds this process's place among those that others started."""

from convoy.launch.local import start
from convoy.launch.rank import RankPlace, as_rank, ended, find_place

__all__ = ["RankPlace", "as_rank", "ended", "find_place", "start"]
