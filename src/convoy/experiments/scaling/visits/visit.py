"""What a rank does when a configuration has its turn: it is built anew, warmed up, and some updates are timed."""

from convoy.experiments.scaling.ranks.processes import Say
from convoy.experiments.scaling.study.configuration import CONVOY
from convoy.experiments.scaling.visits.own import visit_own
from convoy.experiments.scaling.visits.peer import visit_peer
from convoy.experiments.scaling.visits.task import RankTimes, Task


def visit(task: Task, say: Say) -> RankTimes:
    """A rank's part of a visit. All ranks call it."""
    return visit_own(task) if task.kind == CONVOY else visit_peer(task)
