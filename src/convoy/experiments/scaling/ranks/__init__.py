"""Processes for the ranks of a configuration, and where each of them runs."""
