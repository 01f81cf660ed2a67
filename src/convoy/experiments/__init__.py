"""What comes after training: the report of a run and its plots."""

from convoy.experiments.plots import draw_curves
from convoy.experiments.report import write_report

__all__ = ["draw_curves", "write_report"]
