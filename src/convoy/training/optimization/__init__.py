"""Optimisers, schedules, losses and precision, as recipes name them."""
