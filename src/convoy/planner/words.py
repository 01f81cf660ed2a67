"""Numbers of a plan as text for a terminal."""

from collections.abc import Sequence


def seconds(number: float) -> str:
    """A time: `2.41 s`, `39.3 ms`, `820 µs`, or `-` for none."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if number >= 0.9995 * factor:
            return f"{_three(number / factor)} {unit}"
    return "-" if number < 5e-10 else f"{number * 1e6:.2f} µs"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; one that was longer ends with `…`."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def extra(number: float) -> str:
    """By how much longer: `+1.20 ms`; what is not is `as fast`, as predictions err by more than it is shorter."""
    return f"+{seconds(number)}" if number >= 5e-10 else "as fast"


def percent(share: float) -> str:
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
