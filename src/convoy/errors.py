"""The one exception that is meant for the person at the keyboard."""


class ConvoyError(ValueError):
    """A mistake that the user can mend.

    The message is one sentence that names what is wrong and what to change. The command line prints it without
    a traceback and exits with status 2.
    """


class TooLargeError(ConvoyError):
    """A network does not fit into the memory of the devices."""
