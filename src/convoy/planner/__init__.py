"""The planner: measures the devices at hand, searches for the fastest plan, and explains it."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.planner.cost.prediction import Scored as Scored
    from convoy.planner.planner import Planned as Planned
    from convoy.planner.planner import Question as Question
    from convoy.planner.planner import make_plan as make_plan
    from convoy.planner.planner import score as score
    from convoy.planner.workload import Workload as Workload
    from convoy.planner.workload import workload_of as workload_of

_PUBLIC = {"cost.prediction": "Scored", "planner": "Planned Question make_plan score"}
__getattr__ = lazily(__name__, _PUBLIC | {"workload": "Workload workload_of"})
