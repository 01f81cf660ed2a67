"""The page of `convoy plan --on`: images a second over devices for each machine, with the range, and what to do."""

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from convoy.planner.machines import Prediction
from convoy.report import axes as ax
from convoy.report import pages

_COLORS = (ax.TRAIN, ax.TEST, ax.GREEN, ax.PURPLE, ax.OCHRE)


def machines_page(
    network: str, predictions: Sequence[Prediction], images: float, prices: Sequence[float], what: str, command: str
) -> str:
    """The page as HTML. `images` are those of the whole training, `what` is that in words; `prices` are of an hour of
    one device of each machine, or empty."""
    rows = []
    for number, one in enumerate(predictions):
        rows.append(
            {
                "machine": one.machine.label,
                "precision": one.precision,
                "devices": len(one.machine.devices),
                "images": f"{one.best:,.0f}",
                "range": f"{one.best / one.within:,.0f} to {one.best * one.within:,.0f}",
                "speedup": f"{one.speedup:.2f}",
                "efficiency": f"{one.efficiency:.0%}",
                "days": f"{one.days(images):.3g}",
                "price": f"{one.price(images, prices[number]):,.2f}" if prices else "",
                "held": one.held_back_by,
                "plan": str(one.plan),
                "gain": f"{one.gain:.2f}" if one.gain > 1.005 else "",
                "bends": _bends(one),
                "changes": [(change.text, f"{change.gain:.2f}") for change in one.changes],
                "notes": one.notes,
            }
        )
    first = predictions[0]
    return pages.render(
        "machines.html.jinja",
        ("report.css", "plan.css"),
        ("copy.js",),
        name="plan",
        title=network,
        subject=first.machine.text,
        facts=[f"batch {first.batch}", what],
        status="predicted, not measured",
        status_kind="warn",
        rows=rows,
        prices=bool(prices),
        picture=Markup(_picture(predictions)),
        command=command,
    )


def _bends(one: Prediction) -> int | None:
    """The number of devices from which on twice as many are less than 1.7 times as fast; None where none is."""
    for (count, rate), (_, more) in zip(one.curve, one.curve[1:], strict=False):
        if more < 1.7 * rate:
            return count
    return None


def _picture(predictions: Sequence[Prediction]) -> str:
    with ax.house_style():
        figure = ax.new_figure()
        axes = ax.add_axes(figure, "Images a second by data parallelism", "devices")
        for number, one in enumerate(predictions):
            color = _COLORS[number % len(_COLORS)]
            counts = [count for count, _ in one.curve]
            rates = [rate for _, rate in one.curve]
            axes.fill_between(
                counts, [r / one.within for r in rates], [r * one.within for r in rates], color=color, alpha=0.18, lw=0
            )
            axes.plot(counts, rates, color=color, label=one.machine.label, marker="o", markersize=3.4)
            if (bend := _bends(one)) is not None:
                axes.plot([bend], [dict(one.curve)[bend]], color=color, marker="D", markersize=7, fillstyle="none")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6g}"))
            axis.set_minor_locator(NullLocator())
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(3, len(predictions)), **ax.LEGEND)
    described = "Each line is a machine, the band is where nine in ten published values lie around such predictions."
    return pages.inline_svg(figure, "curve", "Images a second over devices", described)
