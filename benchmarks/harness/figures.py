"""Figures for the page: curves with their fits and distributions of gaps, as SVG text to stand inside HTML.

Knows matplotlib, and how its SVG becomes part of a page: no ids shared with another figure, no metadata, colours that
are names of the page's own. The same data give the same text. Refuses to know the page.
"""

import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.curves import PALETTE, Curve, Point, draw_points, off_scale, style
from benchmarks.harness.report import number_text, seconds_scale

if TYPE_CHECKING:
    from benchmarks.harness.fits import Fit

_INK, _FAINT = "#010203", "#040506"
"""Colours that stand for the page's own until the SVG is written."""

_NAMES = {colour: f"var(--line-{place})" for place, colour in enumerate(PALETTE)}
_NAMES |= {_INK: "currentColor", _FAINT: "var(--faint)"}

_ROUNDING = 1e-9
"""The share of a curve's height below which a number is the rounding of floats."""

_DASHES = ("-", "--", "-.", ":")

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, in the page's font
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedLine:
    """A line and what was fitted through it: an equation, and each coefficient with its interval, in words."""

    name: str
    equation: str
    coefficients: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A finished picture: SVG to be put into HTML as it is, and what stands below it."""

    svg: str
    fits: tuple[FittedLine, ...] = ()
    off_scale: str = ""


def curve_figure(curve: Curve, places: Mapping[str, int], key: str) -> Figure:
    """Medians, intervals, runs and fits of one curve. `key` is the page's name for it, `places` its lines' looks."""
    fits = {name: fit for name, points in curve.lines.items() if (fit := fit_line(points)) is not None}

    def draw(axes: Any) -> None:
        draw_points(axes, curve, places, joined=False)
        axes.set_ylabel("")  # the heading says the unit
        _shorten(axes)
        for name, points in curve.lines.items():
            _draw_fit(axes, curve, points, fits.get(name), style(places[name])[0])

    alt = f"{curve.metric.title} in {curve.unit} against {curve.axis.replace('_', ' ')}: {', '.join(curve.lines)}"
    lines = tuple(_fitted_line(curve, name, fit) for name, fit in fits.items())
    return Figure(svg=_svg(draw, key, alt, (4.4, 2.9)), fits=lines, off_scale=off_scale(curve))


def gaps_figure(gaps_s: Mapping[str, Sequence[float]], places: Mapping[str, int], key: str) -> Figure:
    """What share of the gaps between tokens is at most so long, per line, in seconds scaled for reading."""
    everything = [gap for gaps in gaps_s.values() for gap in gaps]
    unit, factor = seconds_scale(float(np.quantile(everything, 0.9)))

    def draw(axes: Any) -> None:
        for name, gaps in gaps_s.items():
            colour, dashes = style(places[name])[0], _DASHES[places[name] % len(_DASHES)]
            axes.ecdf([gap * factor for gap in gaps], color=colour, linestyle=dashes, linewidth=1.4)
        axes.set_xlabel(f"gap, {unit}")
        axes.set_ylabel("share of gaps")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.25)
        _stretch(axes, min(everything), max(everything))

    return Figure(svg=_svg(draw, key, f"distribution of ITL in {unit}: {', '.join(gaps_s)}", (3.3, 2.4)))


def fit_line(points: Sequence[Point]) -> "Fit | None":
    """A straight line through the medians; a parabola where its curvature is certain. None below three places.

    The runs of one case share its luck, so that they are no independent points; and one stalled run would bend a line
    of least squares through all of them.
    """
    from benchmarks.harness.fits import best_fit

    xs, ys = [x for x, _ in points], [m.value for _, m in points if m.value is not None]
    if len(set(xs)) < 3:
        return None
    try:
        return _without_rounding(best_fit(xs, ys), max(map(abs, xs)), max(map(abs, ys)))
    except (ArithmeticError, ValueError):
        return None  # numbers beyond what squares of them can hold


def _without_rounding(fit: "Fit", x: float, y: float) -> "Fit":
    """Zeros where a coefficient is the rounding error of an exact fit, as counts of work have it."""

    def cleaned(value: Any, power: int) -> Any:
        return 0.0 if value is not None and abs(value) * x**power <= _ROUNDING * y else value

    kept = [
        dataclasses.replace(
            each, value=cleaned(each.value, power), low=cleaned(each.low, power), high=cleaned(each.high, power)
        )
        for power, each in enumerate(fit.coefficients)
    ]
    return dataclasses.replace(fit, coefficients=tuple(kept))


def _draw_fit(axes: Any, curve: Curve, points: Sequence[Point], fit: "Fit | None", colour: str) -> None:
    """The fit and its band; without one, the medians joined."""
    if fit is None:
        ys = [(m.value or 0.0) * curve.factor for _, m in points]
        axes.plot([x for x, _ in points], ys, color=colour, linewidth=1, linestyle=":")
        return
    xs = np.linspace(points[0][0], points[-1][0], 60).tolist()
    axes.plot(xs, [fit.predict(x) * curve.factor for x in xs], color=colour, linewidth=1.2)
    bands = [(x, band.low, band.high) for x in xs if None not in ((band := fit.band(x)).low, band.high)]
    if bands:
        where, lows, highs = zip(*bands, strict=True)
        low, high = ([end * curve.factor for end in ends] for ends in (lows, highs))
        axes.fill_between(where, low, high, color=colour, alpha=0.15, linewidth=0)


def _fitted_line(curve: Curve, name: str, fit: "Fit") -> FittedLine:
    equation = fit.equation(x_name=curve.axis.replace("_", " "), scale=curve.factor, unit=curve.unit)
    return FittedLine(name=name, equation=equation, coefficients=(*_coefficients(curve, fit), *_crossover(fit)))


def _crossover(fit: "Fit") -> Iterator[str]:
    """Where a straight line's growth costs as much as its overhead, if that is certain."""
    from benchmarks.harness.fits import crossover

    root = crossover(fit) if fit.kind == "affine" else None
    if root is not None and None not in (root.value, root.low, root.high) and (root.low or 0) > 0:
        yield f"b x = a at {_compact(root.value or 0)} [{_compact(root.low or 0)} .. {_compact(root.high or 0)}]"


def _coefficients(curve: Curve, fit: "Fit") -> Iterator[str]:
    for each in fit.coefficients:
        if each.low is None or each.high is None:
            yield f"{each.name} without interval"
        elif each.high - each.low <= _ROUNDING * abs(each.value):
            yield f"{each.name} exact"
        else:
            yield f"{each.name} {_compact(each.low * curve.factor)} .. {_compact(each.high * curve.factor)}"


def _compact(value: float) -> str:
    return number_text(value) if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def _shorten(axes: Any) -> None:
    """Thousands and millions with a letter, so that large counts fit beside the axis."""
    if axes.get_ylim()[1] >= 10_000:
        from matplotlib.ticker import EngFormatter

        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _stretch(axes: Any, least: float, most: float) -> None:
    """A scale of factors where the gaps span more than one power of ten."""
    if not 0 < 10 * least < most:
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if most / least > 300 else (1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _svg(draw: Callable[[Any], None], key: str, alt: str, size: tuple[float, float]) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_SETTINGS | {"svg.hashsalt": key}):
        canvas = Canvas(figsize=size)
        canvas.subplots_adjust(**_margins(*size))
        draw(canvas.add_subplot())
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), key, alt)


def _margins(width: float, height: float) -> dict[str, float]:
    """The same room around the axes in every figure, so that figures side by side line up."""
    return {"left": 0.55 / width, "right": 1 - 0.12 / width, "bottom": 0.47 / height, "top": 1 - 0.15 / height}


def _inline(svg: str, key: str, alt: str) -> str:
    """matplotlib's file as an element of a page: without preamble, metadata, own style, comments and fixed size."""
    body = svg[svg.index("<svg") :]
    for left_out in (r"<metadata>.*?</metadata>", r"<style[ >].*?</style>", r"<!--.*?-->"):
        body = re.sub(left_out, "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _localise(tag[0], key), body)
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box is not None, "matplotlib writes a viewBox"
    opening = f'<svg viewBox="{box[1]}" role="img" aria-label="{_escape(alt)}">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, body, count=1).strip()


def _localise(tag: str, key: str) -> str:
    """One tag with ids of its own and the page's colours."""
    tag = re.sub(r'\bid="', f'id="{key}-', tag).replace("xlink:href", "href")
    tag = tag.replace('href="#', f'href="#{key}-').replace("url(#", f"url(#{key}-")
    tag = re.sub(r"font: [^;\"]*|font-family: [^;\"]*", lambda found: _size_only(found[0]), tag)
    return re.sub("#[0-9a-f]{6}(?![0-9a-f])", lambda colour: _NAMES.get(colour[0], colour[0]), tag)


def _size_only(font: str) -> str:
    """A font's size; the family is the page's."""
    size = re.search(r"[\d.]+px", font)
    return f"font-size: {size[0]}" if size else "font-style: normal"


def _escape(text: str) -> str:
    from html import escape

    return escape(text)
