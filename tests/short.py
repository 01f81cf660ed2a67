"""Measurements that tests make shorter than users do: what they find is not looked at so closely."""

import sys


def measure_shortly() -> None:
    """From now on in this process, if it may plan: an optimizer is timed on tensors a sixteenth as large."""
    if "torch" in sys.modules:
        from convoy.planner import measured

        measured._POINTS = ((1, 2**20), (16, 2**16), (256, 2**12), (128, 64))
