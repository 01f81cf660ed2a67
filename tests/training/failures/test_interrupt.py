"""Signals are noted once; a second one acts as usual."""

import os
import signal

import pytest

from convoy.training.failures.interrupt import SIGNALS, Interrupt


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
