"""What the engine itself takes for every parameter and every exchange, beside computing and sending."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

from convoy.cost.calibrated import Calibrated
from convoy.cost.costs import Around, Costs
from convoy.cost.step import predict
from convoy.engine.parallelize import local_samples, parallelize
from convoy.planning.ranks import Ranks
from convoy.planning.rehearse import rehearse
from convoy.planning.workload import Workload, momentum, workload_of
from convoy.plans.plan import Plan

_FEW, _MANY = 4, 24
_WIDTH, _UPDATES = 16, 15


@dataclass(frozen=True)
class Overhead:
    """Seconds of the engine.

    Attributes:
        per_parameter: of an update, for each parameter whose gradient is added over ranks.
        per_transfer: for each redistribution, forward and backward together.
        fixed: of an update.
    """

    per_parameter: float = 0.0
    per_transfer: float = 0.0
    fixed: float = 0.0
