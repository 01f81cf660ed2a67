"""Times as Slurm has them."""

import re

from convoy.errors import ConvoyError

_UNITS = {"d": 1440, "h": 60, "m": 1}
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d{1,2})(?::(?P<minutes>\d{2}))?(?::(?P<seconds>\d{2}))?")


def time_limit(text: str) -> str:
    """A time limit in Slurm's form `days-hours:minutes:seconds`.

    Args:
        text: such as `90m`, `8h`, `1d12h`, or as Slurm has it: `8:00:00`, `1-12`.

    Raises:
        ConvoyError: it is no time.
    """
    said = text.strip().lower()
    parts = re.findall(r"(\d+)([dhm])", said)
    match = _SLURM.fullmatch(said)
    if parts and "".join(number + unit for number, unit in parts) == said:
        minutes = sum(int(number) * _UNITS[unit] for number, unit in parts)
    elif match is not None and (match["days"] or match["seconds"]):
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        minutes += days * 1440 + hours * 60 + (seconds > 0)
    else:
        raise ConvoyError(f"--time {text!r} is no time: write e.g. 8h, 90m, 1d12h or 1-12:00:00")
    if minutes == 0:
        raise ConvoyError(f"--time {text!r} is no time at all: write e.g. 8h")
    days, minutes = divmod(minutes, 1440)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def seconds_of(limit: str) -> int:
    """Seconds of what `time_limit` gives."""
    days, _, rest = limit.partition("-")
    hours, minutes, seconds = map(int, rest.split(":"))
    return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
