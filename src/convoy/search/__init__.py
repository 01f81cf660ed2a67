"""The planner: the fastest plans of a network for a number of devices."""

from convoy.plans.fixes import Fix
from convoy.search.costs import Costs, additive_seconds
from convoy.search.result import Candidate, NextBest, SearchResult
from convoy.search.search import search

__all__ = ["Candidate", "Costs", "Fix", "NextBest", "SearchResult", "additive_seconds", "search"]
