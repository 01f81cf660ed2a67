"""The planner: the fastest plans of a network for a number of devices."""

from convoy.planner.search.prices import Costs, additive_seconds
from convoy.planner.search.search import Candidate, NextBest, SearchResult, search
from convoy.plans.fit import Fix

__all__ = ["Candidate", "Costs", "Fix", "NextBest", "SearchResult", "additive_seconds", "search"]
