"""Signals are noted once; a second one acts as usual."""

import ctypes
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


def test_it_is_told_while_the_main_thread_computes() -> None:
    here, there = os.pipe()
    os.set_inheritable(here, True)
    told = []

    def tell(name: str) -> None:
        told.append((name, interrupt.signal))
        os.write(there, b"x")

    with Interrupt(tell=tell) as interrupt:
        # One call without Python in it, in which the signal comes and which waits until it was told.
        ctypes.CDLL(None).system(f"kill -USR2 {os.getpid()}; timeout 20 head -c 1 <&{here} >/dev/null".encode())
        assert interrupt.signal == "SIGUSR2"
    assert told == [("SIGUSR2", None)]
    for end in (here, there):
        os.close(end)


def test_only_the_first_one_is_kept_from_those_who_listened_before() -> None:
    here, there = os.pipe()
    os.set_blocking(there, False)
    before = signal.set_wakeup_fd(there)
    handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        with Interrupt():
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert os.read(here, 8) == bytes([signal.SIGUSR2])
        assert signal.set_wakeup_fd(there) == there
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR2, handler)
        for end in (here, there):
            os.close(end)


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
