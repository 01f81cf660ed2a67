"""Which rows of its input a part of the output of a convolution or a pooling needs, along one dimension."""

from dataclasses import dataclass
from functools import lru_cache

from convoy.plans.layout import Split, indices


@dataclass(frozen=True)
class Need:
    """The input that a rank needs for its rows of the output."""

    rows: range  # of the input, inside the tensor
    # for `Window`, rows of padding around `rows`, only where they lie outside the tensor; for `Transposed`, rows of
    # zeros to put around the local result, or to cut off it where negative
    before: int
    after: int


@dataclass(frozen=True)
class _Sliding:
    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0  # padding at the two ends
    after: int = 0

    @property
    def span(self) -> int:
        """Rows from the first to the last of one window."""
        return self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Window(_Sliding):
    """A window that slides over a dimension of `size`, as in convolution and pooling: output row o covers the input
    rows o·stride − before + dilation·j for 0 ≤ j < kernel."""

    ceil_mode: bool = False  # whether a last window may reach past the padding at the end, as torch's pooling has it

    @property
    def output_size(self) -> int:
        """Number of windows: those that start in the padding at the end are dropped."""
        room = self.size + self.before + self.after - self.span
        if not self.ceil_mode:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        return count - ((count - 1) * self.stride >= self.size + self.before)

    def needed(self, output: range) -> Need:
        """The input that a consecutive range of output rows needs."""
        if not output:
            return Need(range(0), 0, 0)
        start = output[0] * self.stride - self.before
        stop = output[-1] * self.stride - self.before + self.span
        rows = range(min(max(start, 0), self.size), min(max(stop, 0), self.size))
        length = stop - start
        return Need(rows, min(max(-start, 0), length), min(max(stop - self.size, 0), length))

    def counts(self, output: range, include_padding: bool) -> tuple[int, ...]:
        """How many input rows each window averages, for undilated windows."""
        low, high = (-self.before, self.size + self.after) if include_padding else (0, self.size)
        starts = (row * self.stride - self.before for row in output)
        return tuple(max(1, min(start + self.kernel, high) - max(start, low)) for start in starts)


@dataclass(frozen=True)
class Transposed(_Sliding):
    """The window of a transposed convolution: input row i touches the output rows i·stride − before + dilation·j.

    The local work for a range of output rows: the transposed convolution of `Need.rows` with the same stride and
    dilation, but without padding, output padding and bias; then `Need.before` and `Need.after` rows of zeros around it
    (negative: so many rows cut off), which `torch.nn.functional.pad` takes as they are; then the bias. A need without
    rows is `Need.after` rows of zeros.
    """

    output_padding: int = 0

    @property
    def output_size(self) -> int:
        """Rows of the whole output."""
        return (self.size - 1) * self.stride + self.span - self.before - self.after + self.output_padding

    def needed(self, output: range) -> Need:
        """The input rows that touch a consecutive range of output rows."""
        if not output:
            return Need(range(0), 0, 0)
        first = -((self.span - 1 - self.before - output[0]) // self.stride)
        last = (output[-1] + self.before) // self.stride
        rows = range(max(first, 0), min(last + 1, self.size))
        if not rows:
            return Need(range(0), 0, len(output))
        start = rows[0] * self.stride - self.before
        stop = rows[-1] * self.stride - self.before + self.span
        return Need(rows, start - output[0], output[-1] + 1 - stop)


@lru_cache(maxsize=1 << 12)
def halo_split(window: Window | Transposed, output: Split) -> Split:
    """The overlapping parts of the input that the parts of the output need."""
    rows = [part for part in output.parts if isinstance(part, range)]
    assert len(rows) == len(output.parts), "rows of an output are consecutive"
    return Split(output.axes, tuple(indices(window.needed(part).rows) for part in rows))
