"""The one exception that is meant for the person at the keyboard.

Files lie beside this one where several folders need them and no folder stands above all of these.
"""

from convoy.terminal import printable, shortened


class ConvoyError(ValueError):
    """A mistake that the user can mend.

    The message is one sentence that names what is wrong and what to change. The command line prints it without
    a traceback and exits with status 2. Control characters, of names in it, are escaped, and what is long is shortened.

    >>> convoy.Plan.parse("filtre=2")
    Traceback (most recent call last):
    convoy.errors.ConvoyError: plan 'filtre=2': filtre is no strategy: did you mean filter?
    """

    def __str__(self) -> str:
        return shortened(printable(super().__str__(), keep="\n"))


class MachineError(ConvoyError):
    """A process, a file system or the network failed, through no mistake: started again, the same run may go well.

    Ranks that end by it are started again where that was asked for; the exit status is 1.
    """


class GoneError(MachineError):
    """The folder that a run writes to has gone: started again, the ranks would begin it anew in silence."""


class MeetingError(MachineError):
    """The ranks did not find each other, in time or at all; where they are started again they may."""


class TooLargeError(ConvoyError):
    """A network does not fit into the memory of the devices."""

    def __init__(self, message: str, needed: float = float("inf")) -> None:
        super().__init__(message)
        self.needed = needed  # bytes on the device that needs most, in what is smallest


class RankFailedError(MachineError):
    """What all ranks tried together failed on one of them."""

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory  # whether it failed for want of memory

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.out_of_memory)


def reason(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
