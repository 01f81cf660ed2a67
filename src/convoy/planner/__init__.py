"""The planner: measures the devices at hand, searches for the fastest plan, and explains it."""
