"""What a file says of long work: a line now and then, before a training as in it."""

import io

from convoy import progress
from convoy.progress import ConsoleReporter
from convoy.terminal import Console
from made_time import made_time


def test_long_work_before_a_training_is_told_in_a_file_too() -> None:
    with made_time(progress) as clock:
        written = io.StringIO()
        reporter = ConsoleReporter(Console(file=written, highlight=False))
        for second in range(12):
            clock.now += 1 if second else 0
            reporter.prepare("planning, about 12 s: profiling sample", second, 12)
        assert written.getvalue().splitlines() == [
            "planning, about 12 s: profiling sample (5 of 12)",
            "planning, about 12 s: profiling sample (10 of 12)",
        ]
        reporter.begin(0, 2)
        reporter.advance(1, "update 1")  # the first at once
        assert written.getvalue().splitlines()[-1] == "update 1"
