"""Live bytes over one step, an engine under the other, by class: the area's height is all that is live.

Along a phase lie allocations and frees in their order, evenly: in time most of them are a blink, and a step under the
profiler has no time that means anything. Phases have the same place for all engines, bytes the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from bench.svg import WIDTH, line, picture, rect, tag, text
from bench.views import CLASS_TITLES, by_phase, format_size
from common.harness.memory_record import CLASSES, OTHER, Timeline

_LEFT, _RIGHT, _TOP = 84, 12, 60
_HEIGHT, _GAP = 104, 34
_COLORS = {name: f"c{6 if name == OTHER else number}" for number, name in enumerate(CLASSES)}
_LEAST_SHARE = 0.07
"""Of the width, what the shortest phase gets."""
_CAPTION = (
    "of the rank with the highest peak; along a phase lie allocations and frees in their order, which is not time"
)


def memory_picture(lines: Mapping[str, Timeline]) -> str:
    """The steps of several engines, by name, as SVG."""
    most = max(max(timeline.totals) for timeline in lines.values())
    shares = _shares([by_phase(timeline) for timeline in lines.values()])
    edges = [_LEFT + (WIDTH - _LEFT - _RIGHT) * share for share in accumulate(shares, initial=0.0)]
    parts = _legend()
    names = next(iter(lines.values())).ends_s
    for name, (begin, end) in zip(names, pairwise(edges), strict=True):
        parts.append(text(name, (begin + end) / 2, _TOP - 24, text_anchor="middle", class_="faint"))
    top = _TOP
    for engine, timeline in lines.items():
        parts += _panel(engine, timeline, edges, top, most)
        top += _HEIGHT + _GAP
    peaks = ", ".join(f"{engine} {format_size(max(timeline.totals))}" for engine, timeline in lines.items())
    parts.append(text(_CAPTION, _LEFT, top - _GAP + 18, class_="faint"))
    return picture(parts, top - _GAP + 26, f"Live bytes over one step; peaks: {peaks}")


def _legend() -> list[str]:
    parts, x = [], float(_LEFT)
    for name in CLASSES:
        title = CLASS_TITLES[name]
        parts += [rect(x, 6, 11, 11, class_=_COLORS[name]), text(title, x + 16, 16)]
        x += 34 + 6.2 * len(title)
    return parts


def _shares(steps: Sequence[Sequence[Sequence[object]]]) -> list[float]:
    """How much of the width each phase gets: what it has of all changes, and no phase next to nothing."""
    counts = [sum(map(len, phases)) for phases in zip(*steps, strict=True)]
    wide = [max(count, _LEAST_SHARE * sum(counts)) for count in counts]
    return [count / sum(wide) for count in wide]


def _panel(engine: str, timeline: Timeline, edges: Sequence[float], top: float, most: int) -> list[str]:
    ground = top + _HEIGHT
    xs: list[float] = []
    samples: list[tuple[int, ...]] = []
    for (begin, end), phase in zip(pairwise(edges), by_phase(timeline), strict=True):
        xs += [begin + (end - begin) * number / len(phase) for number in range(len(phase))]
        samples += phase
    xs.append(edges[-1])
    heights = [[0.0, *accumulate(size * _HEIGHT / most for size in sample)] for sample in samples]
    parts = [
        text(engine, _LEFT, top - 8, class_="name"),
        text(format_size(most) or "", _LEFT - 6, top + 10, text_anchor="end", class_="faint"),
        text("0", _LEFT - 6, ground, text_anchor="end", class_="faint"),
        line(_LEFT, top, WIDTH - _RIGHT, top),
    ]
    for number, name in enumerate(CLASSES):
        lower, upper = [each[number] for each in heights], [each[number + 1] for each in heights]
        if lower != upper:
            path = _area(xs, [ground - h for h in lower], [ground - h for h in upper])
            parts.append(tag("path", tag("title", CLASS_TITLES[name]), d=path, class_=f"area {_COLORS[name]}"))
    parts += [line(x, top, x, ground, "rule dash") for x in edges[1:-1]]
    parts.append(line(_LEFT, ground, WIDTH - _RIGHT, ground, "rule mark"))
    return parts + _peak(samples, xs, ground, most)


def _peak(samples: Sequence[Sequence[int]], xs: Sequence[float], ground: float, most: int) -> list[str]:
    totals = [sum(sample) for sample in samples]
    place = totals.index(max(totals))
    x, y = (xs[place] + xs[place + 1]) / 2, ground - totals[place] * _HEIGHT / most
    anchor = "start" if x < WIDTH / 2 else "end"
    side = 6 if anchor == "start" else -6
    return [
        tag("path", d=f"M{x:.1f} {y:.1f}l-4 -7h8z", fill="currentColor"),
        text(f"peak {format_size(totals[place])}", x + side, y - 4, text_anchor=anchor, class_="name"),
    ]


def _area(xs: Sequence[float], lower: Sequence[float], upper: Sequence[float]) -> str:
    """The outline between two staircases; sample i is from xs[i] to xs[i + 1]."""
    there = _stairs(xs, upper)
    back = _stairs(xs[::-1], lower[::-1])
    return f"M{xs[0]:.1f} {upper[0]:.1f}{there}V{lower[-1]:.1f}{back}Z"


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> str:
    """From a point at (xs[0], ys[0]) on; steps of the same height are one."""
    path = ""
    for number, y in enumerate(ys):
        if number and f"{y:.1f}" != f"{ys[number - 1]:.1f}":
            path += f"H{xs[number]:.1f}V{y:.1f}"
    return path + f"H{xs[-1]:.1f}"
