"""The pages of a run and of a plan, and their plots."""
