"""Line and stacked charts as inline SVG: no scripts, no files, colours from the page's own light or dark style.

Text inside a chart is escaped; a hover title on each point gives its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.monitor.texts import shown

_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 14.0, 12.0, 34.0
_MAX_HOVERS = 400
"""Hover points for each series; more only weigh the file down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line (or dots), with an optional interval at each point. Values that are not finite make a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 1
    """1 to 6, of the page's palette."""
    style: Literal["line", "faint", "dots"] = "line"
    """Thin for ``faint``; ``dots`` have error bars instead of a band."""


@dataclass(slots=True)
class _Axes:
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float
    height: float
    is_log: bool = False
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.is_log:
            value, low, high = (math.log10(max(v, low)) for v in (value, low, high))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def line_chart(
    series: Sequence[Series],
    *,
    y_range: tuple[float, float] | None = None,
    is_log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    width: float = 640,
    height: float = 240,
) -> str:
    """SVG of the series. ``marks``: vertical lines (x, label), such as resumes. Empty where nothing is finite."""
    values = [v for s in series for part in (s.y, s.low, s.high) for v in part if math.isfinite(v)]
    if is_log:
        values = [v for v in values if v > 0]
    xs = [x for s in series for x in s.x]
    if not values or not xs:
        return ""
    axes = _Axes(_padded(min(xs), max(xs), 0.0), y_range or _y_range(values, is_log), width, height, is_log)
    _frame(axes)
    for x, label in marks:
        place = axes.x(x)
        axes.parts.append(
            f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}">'
            f"<title>{shown(label)}</title></line>"
        )
    num_dots = 0
    for one in series:
        if one.style == "dots":
            # Side by side: two evaluations of one batch would hide each other.
            _dots(axes, one, shift=6.0 * num_dots)
            num_dots += 1
        else:
            _draw(axes, one)
    return _svg(axes)


def stacked_chart(
    names: Sequence[str],
    x: Sequence[float],
    values: Sequence[Sequence[float]],
    *,
    width: float = 640,
    height: float = 240,
) -> str:
    """SVG of stacked bars; ``values[i][j]`` is part ``names[i]`` at ``x[j]``. At most 120 bars: more are averaged."""
    if not x:
        return ""
    x, values = _averaged(x, values, 120)
    totals = [sum(part[j] for part in values) for j in range(len(x))]
    axes = _Axes(_padded(min(x), max(x), 0.5), (0.0, max(totals) * 1.05 or 1.0), width, height)
    _frame(axes)
    step = (axes.x(axes.x_range[1]) - axes.x(axes.x_range[0])) / max(1, len(x))
    for j, place in enumerate(x):
        base = 0.0
        for i, part in enumerate(values):
            top, bottom = axes.y(base + part[j]), axes.y(base)
            base += part[j]
            axes.parts.append(
                f'<rect class="f{i % 6 + 1}" x="{axes.x(place) - step * 0.4:.1f}" y="{top:.1f}" '
                f'width="{step * 0.8:.1f}" height="{max(0.0, bottom - top):.1f}">'
                f"<title>batch {place:g}, {shown(names[i])}: {tick_text(part[j])}</title></rect>"
            )
    return _svg(axes)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """HTML legend: (name, colour number)."""
    return "".join(f'<span class="key"><i class="b{c}"></i>{shown(name)}</span>' for name, c in names)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the ``window`` (odd) values around each place, of fewer at the ends: centred, so that it does not lag."""
    half = window // 2
    parts = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]


def tick_text(value: float) -> str:
    """A short label: 0.25, 5k, 3e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e3:
        return f"{value / 1e3:.3g}k"
    return f"{value:.3g}"


# ------------------------------------------------------------------------------------------------- inside


def _svg(axes: _Axes) -> str:
    return (
        f'<svg viewBox="0 0 {axes.width:g} {axes.height:g}" role="img" preserveAspectRatio="xMidYMid meet">'
        + "".join(axes.parts)
        + "</svg>"
    )


def _padded(low: float, high: float, pad: float) -> tuple[float, float]:
    if high <= low and pad == 0:
        pad = 0.5
    return low - pad, high + pad


def _y_range(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if is_log:
        return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
    if low >= 0 and low < high * 0.6:
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def _ticks(low: float, high: float, num: int) -> list[float]:
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _frame(axes: _Axes) -> None:
    low, high = axes.y_range
    if axes.is_log:
        first, last = round(math.log10(low)), round(math.log10(high))
        y_ticks = [10.0**e for e in range(first, last + 1, max(1, (last - first) // 4))]
    else:
        y_ticks = _ticks(low, high, 5)
    for tick in y_ticks:
        place = axes.y(tick)
        axes.parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{axes.width - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 7}" y="{place + 3.5:.1f}" text-anchor="end">{tick_text(tick)}</text>'
        )
    bottom = axes.height - _BOTTOM
    axes.parts.append(f'<line class="axis" x1="{_LEFT}" x2="{axes.width - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for tick in sorted({round(t) for t in _ticks(*axes.x_range, 8)}):
        if axes.x_range[0] <= tick <= axes.x_range[1]:
            axes.parts.append(
                f'<text class="tick" x="{axes.x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>'
            )
    middle = (_LEFT + axes.width - _RIGHT) / 2
    axes.parts.append(f'<text class="tick" x="{middle}" y="{axes.height - 4}" text-anchor="middle">batch</text>')


def _draw(axes: _Axes, series: Series) -> None:
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True)]
    if series.low and series.high:
        edge = [f"{axes.x(x):.1f},{axes.y(h):.1f}" for x, h in zip(series.x, series.high, strict=True)]
        edge += [f"{axes.x(x):.1f},{axes.y(v):.1f}" for x, v in reversed(list(zip(series.x, series.low, strict=True)))]
        axes.parts.append(f'<polygon class="band f{series.colour}" points="{" ".join(edge)}"/>')
    for run in _finite_runs(points):
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in run)
        kind = " faint" if series.style == "faint" else ""
        axes.parts.append(f'<polyline class="line{kind} s{series.colour}" points="{path}"/>')
        if len(run) == 1:
            axes.parts.append(_circle(axes.x(run[0][0]), axes.y(run[0][1]), 3.0, f"dot f{series.colour}"))
    stride = max(1, len(points) // _MAX_HOVERS)
    for x, y in points[::stride]:
        if math.isfinite(y):
            title = f"{series.name}, batch {x:g}: {tick_text(y)}"
            axes.parts.append(_circle(axes.x(x), axes.y(y), 5.0, "hover", title))


def _dots(axes: _Axes, series: Series, shift: float) -> None:
    for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        if not math.isfinite(y):
            continue
        title = f"{series.name}, batch {x:g}: {y:.3f}"
        place = axes.x(x) + shift
        if series.low and series.high:
            low, high = series.low[index], series.high[index]
            title += f" [{low:.3f}, {high:.3f}]"
            axes.parts.append(
                f'<line class="bar s{series.colour}" x1="{place:.1f}" x2="{place:.1f}" '
                f'y1="{axes.y(low):.1f}" y2="{axes.y(high):.1f}"/>'
            )
        axes.parts.append(_circle(place, axes.y(y), 4.0, f"dot f{series.colour}", title))


def _circle(x: float, y: float, radius: float, kind: str, title: str = "") -> str:
    inside = f"<title>{shown(title)}</title>" if title else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{inside}</circle>'


def _finite_runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _averaged(
    x: Sequence[float], values: Sequence[Sequence[float]], most: int
) -> tuple[list[float], list[list[float]]]:
    size = math.ceil(len(x) / most)
    starts = range(0, len(x), size)

    def mean(part: Sequence[float]) -> list[float]:
        return [math.fsum(part[i : i + size]) / len(part[i : i + size]) for i in starts]

    return mean(x), [mean(part) for part in values]
