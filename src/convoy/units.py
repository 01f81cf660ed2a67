"""Numbers as text: times, bytes, shares, counts, for the terminal and for pages, and sizes as people type them.

On the terminal a plain space stands before a unit. On pages it is a narrow no-break space (SI brochure, 5.4), digits
are grouped by commas, a number that is not finite is unknown, and no more digits are shown than are known.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from convoy.errors import ConvoyError


def seconds(number: float) -> str:
    """A time: `2.41 s`, `39.3 ms`, `820 µs`, or `-` for none."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if number >= 0.9995 * factor:
            return f"{_three(number / factor)} {unit}"
    return "-" if number < 5e-10 else f"{number * 1e6:.2f} µs"


def extra(number: float) -> str:
    """By how much longer: `+1.20 ms`; what is not is `as fast`, as predictions err by more than it is shorter."""
    return f"+{seconds(number)}" if number >= 5e-10 else "as fast"


def rough_percent(share: float) -> str:
    """A share: `37 %`, `3.2 %`."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def times_as_fast(gain: float) -> str:
    """A gain in speed: `1.31 × as many samples a second`."""
    return f"{gain:.2f} × as many samples a second"


def shape(sizes: Sequence[int]) -> str:
    """`32×64×55×55`."""
    return "×".join(map(str, sizes)) or "-"


def per_second(number: float) -> str:
    """Samples a second, three digits: `1,240`, `35.2`."""
    return f"{number:,.0f}" if number >= 99.95 else _three(number)


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def size(num_bytes: int) -> str:
    """A number of bytes for people: `1.5 MB`, or `-` for none."""
    if not num_bytes:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        number = num_bytes / factor
        if number >= 0.9995:
            return f"{number:.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"
    return f"{num_bytes} B"


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(b|kb|mb|gb|tb|kib|mib|gib)?", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str, option: str) -> float:
    """A size such as `8GB` or `512MiB` in bytes; a number alone, of a megabyte at least, is bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0 or (not match[2] and float(match[1]) < 1e6):
        raise ConvoyError(f"{option} {text} is no size: write e.g. 8GB or 512MiB")
    return float(match[1]) * _UNITS[(match[2] or "b").lower()]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Lines of a table whose columns are as wide as they must be; those under the headers in `right` are set flush
    right."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return [
        "  ".join(
            cell.rjust(width) if header in right else cell.ljust(width)
            for header, cell, width in zip(headers, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


SPACE = "\u202f"  # narrow no-break space: between a number and its unit (SI brochure, 5.4)

MINUS = "\u2212"
UNKNOWN = "–"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def count(value: int) -> str:
    """A whole number in groups of three: 61,706."""
    return f"{value:,}".replace("-", MINUS)


def decimal(value: float | None, places: int) -> str:
    """A number with a fixed number of decimal places; a number that is not finite is unknown."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.{places}f}".replace("-", MINUS)


def significant(value: float | None, digits: int = 3) -> str:
    """A number to `digits` significant digits; powers of ten where zeros would be hard to count."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if -5 < exponent < 7:
        return decimal(value, max(0, digits - 1 - exponent))
    return f"{decimal(value / 10**exponent, digits - 1)}{SPACE}·{SPACE}10{str(exponent).translate(_SUPERSCRIPTS)}"


def tick(value: float) -> str:
    """A number at the tick of an axis, without needless zeros: 0.5, 20, 12,500, 200 k, 10⁻⁵, 3·10⁻⁶."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if 5 <= exponent < 9:
        size, prefix = (1e6, "M") if exponent >= 6 else (1e3, "k")
        return f"{value / size:g}{SPACE}{prefix}"
    if -5 < exponent < 5:
        text = decimal(value, max(0, 6 - max(exponent, 0)))
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa = f"{value / 10**exponent:g}"
    power = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def percent(share: float | None, places: int = 1) -> str:
    """A share between 0 and 1 as a percentage: 98.7 %. What is not quite all or nothing does not read as if it were."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    least = 10.0**-places
    rounded = round(100 * share, places)
    if 0 < share < 1 and rounded in (0, 100):
        text = f"<{SPACE}{decimal(least, places)}" if rounded == 0 else f">{SPACE}{decimal(100 - least, places)}"
    else:
        text = decimal(100 * share, places)
    return f"{text}{SPACE}%"


def percent_places(images: int | None) -> int:
    """Decimal places of a percentage that `images` pictures can tell apart: one for 1,000, two from 10,000 on."""
    return 1 if images is None or images < 10_000 else 2


def prefixed(value: float | None, unit: str = "") -> str:
    """A large number with an SI prefix, three digits: 61.1 M, 4.09 GFLOP."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{significant(value / size)}{SPACE}{prefix}{unit}"
    return f"{decimal(value, 0) if value == int(value) else significant(value)}{SPACE if unit else ''}{unit}"


def duration(seconds: float | None) -> str:
    """A time in the two units that matter: 0.84 s, 42.3 s, 2 min 14 s, 3 h 05 min, 2 d 04 h."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{decimal(seconds, 2 if seconds < 1 else 1)}{SPACE}s"
    whole = round(seconds)
    for size, unit, part, small in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min")):
        if whole >= size:
            rounded = round(whole / part)
            return f"{rounded * part // size}{SPACE}{unit} {rounded % (size // part):02d}{SPACE}{small}"
    return f"{whole // 60}{SPACE}min {whole % 60:02d}{SPACE}s"


def plural(number: int, word: str, many: str | None = None) -> str:
    """A counted noun: 1 image, 2 images."""
    return f"{count(number)} {word if number == 1 else many or word + 's'}"


def shorten(text: str, most: int = 42) -> str:
    """A text of at most `most` characters, with an ellipsis where some were left out."""
    return text if len(text) <= most else text[: most - 1].rstrip(" ,") + "…"


def wilson(share: float, number: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share seen in `number` independent trials (Wilson, 1927)."""
    z = 1.959964
    middle = share + z * z / (2 * number)
    spread = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    scale = 1 + z * z / number
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def value(anything: object) -> str:
    """A value of the configuration or of a derived quantity, as text."""
    if isinstance(anything, bool):
        return "yes" if anything else "no"
    if isinstance(anything, int):
        return count(anything)
    if isinstance(anything, float):
        return tick(float(f"{anything:.6g}")) if 1e-4 <= abs(anything) < 1e5 else significant(anything, 4)
    if isinstance(anything, (list, tuple)):
        shown = ", ".join(value(item) for item in anything[:8])
        return f"{shown}, … ({count(len(anything))} in all)" if len(anything) > 8 else shown
    if isinstance(anything, Mapping):
        return "; ".join(f"{str(key).replace('_', ' ')}: {value(item)}" for key, item in anything.items())
    return UNKNOWN if anything is None else str(anything)
