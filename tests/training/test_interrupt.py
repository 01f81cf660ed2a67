"""Signals are noted once; a second one acts as usual."""

import os
import signal
from unittest.mock import Mock

import pytest

from convoy.training.interrupt import SIGNALS, Interrupt, Stop


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        os.kill(os.getpid(), number)
        assert interrupt.signal == number.name
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before


def test_a_second_interrupt_ends_the_program_at_once() -> None:
    with Interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_due", [True, False])
def test_a_signal_that_the_other_ranks_had_before_may_come_late(is_due: bool) -> None:
    came = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        with Interrupt() as interrupt:
            interrupt.is_due = is_due
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (interrupt.signal, came) == (("SIGUSR2", []) if is_due else (None, [signal.SIGUSR2]))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert came[-1:] == [signal.SIGUSR2]  # a second one acts as usual
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_stops_another_rank_is_due_here() -> None:
    interrupt = Interrupt()
    devices = Mock(num=2, rank=1, largest=lambda number, wait: (3, 1))
    assert Stop(devices, interrupt).after_update()
    assert interrupt.is_due and interrupt.signal is None
