"""The planner: the fastest plans of a network for a number of devices."""
