"""One step drawn as lanes of bars, engines under each other on one time scale.

A bucket has a colour and a letter, the same in all lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.svg import WIDTH, line, picture, rect, tag, text
from common.harness.instruments.trace import COMPUTE, LAUNCH, LINK, PHASE, WAIT, Span
from common.harness.link.meter import OTHER
from common.ranges import GATHER, REDUCE

_LEFT, _RIGHT = 84, 12
_LANE, _GAP = 18, 22
_COLORS = 8
_LETTER_WIDTH = 9
"""A bar that is narrower has no room for its letter."""
_WAITS, _LAUNCHES, _NOBODY = {"fill": "url(#waiting)"}, {"class_": "launch"}, {"class_": "none"}
_LOOKS = {"waits": _WAITS, "launches a collective": _LAUNCHES, "for no bucket": _NOBODY}


def lanes_of(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """The lanes of one step that hold something, each with its title: phases, compute, and each link by kind."""
    lanes = [(name, [span for span in spans if span.lane == name]) for name in (PHASE, COMPUTE)]
    links = list(dict.fromkeys(span.lane for span in spans if span.lane.startswith(LINK)))
    for link in links:
        for kind in (GATHER, REDUCE, OTHER):
            carried = [span for span in spans if (span.lane, span.kind) == (link, kind)]
            lanes.append((kind if len(links) == 1 else f"{kind} {link.removeprefix(LINK).strip()}", carried))
    return [(title, lane) for title, lane in lanes if lane]


def step_length(spans: Sequence[Span]) -> float:
    """Seconds from the start of a step to the end of its last phase."""
    return max(span.end_s for span in spans if span.lane == PHASE)


def lanes_picture(steps: Mapping[str, Sequence[Span]], letters: Mapping[str, str]) -> str:
    """The steps of several engines, by name, as SVG; `letters` is what buckets are called."""
    longest_s = max(map(step_length, steps.values()))
    per_s = (WIDTH - _LEFT - _RIGHT) / longest_s
    parts = [tag("defs", _WAITING)]
    top = 16.0
    for engine, spans in steps.items():
        parts.append(text(engine, _LEFT, top, class_="name"))
        top += 6
        for title, lane in lanes_of(spans):
            parts.append(text(title, _LEFT - 6, top + 12, text_anchor="end", class_="faint"))
            for span in lane:
                parts += _bar(span, letters, top, per_s)
            parts.append(line(_LEFT, top + _LANE, WIDTH - _RIGHT, top + _LANE))
            top += _LANE + 2
        top += _GAP
    parts.append(text(f"{longest_s * 1e3:.4g} ms", WIDTH - _RIGHT, top - _GAP + 14, text_anchor="end", class_="faint"))
    parts.append(text("0", _LEFT, top - _GAP + 14, class_="faint"))
    legend, top = _legend(letters, top + 8)
    return picture([*parts, *legend], top, f"One step as lanes, {', '.join(steps)}")


_WAITING = (
    '<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M0 6L6 0" class="rule"></path></pattern>'
)


def _legend(letters: Mapping[str, str], top: float) -> tuple[list[str], float]:
    """What bars mean, in as many lines as it takes; and where it ends."""
    entries = [(letters[name], name, {"class_": color}) for name, color in _colors(letters).items()]
    entries += [("", title, look) for title, look in _LOOKS.items()]
    parts, x = [], float(_LEFT)
    for letter, title, look in entries:
        width = 40 + 6.4 * len(title)
        if x + width > WIDTH - _RIGHT:
            x, top = float(_LEFT), top + 20
        parts.append(rect(x, top, 14, 13, **look))
        parts += [text(letter, x + 7, top + 10, class_="in")] if letter else []
        parts.append(text(title, x + 20, top + 11, class_="faint"))
        x += width
    return parts, top + 20


def _colors(letters: Mapping[str, str]) -> dict[str, str]:
    """The style of each bucket."""
    return {name: f"c{number % _COLORS}" for number, name in enumerate(letters)}


def _bar(span: Span, letters: Mapping[str, str], top: float, per_s: float) -> list[str]:
    x, width = _LEFT + span.start_s * per_s, max(0.4, (span.end_s - span.start_s) * per_s)
    title = f"{span.kind} {span.name}: {(span.end_s - span.start_s) * 1e3:.3g} ms"
    if span.lane == PHASE:
        bar = rect(x, top + 2, width, _LANE - 4, title, fill="none", class_="rule")
        return [bar, text(span.name, x + width / 2, top + 13, text_anchor="middle")] if width > 50 else [bar]
    if span.kind == WAIT:
        return [rect(x, top + 2, width, _LANE - 4, title, **_WAITS)]
    if span.kind == LAUNCH:
        return [rect(x, top + 2, width, _LANE - 4, title, **_LAUNCHES)]
    letter = letters.get(span.name, "")
    look = {"class_": _colors(letters)[span.name]} if letter else _NOBODY
    bar = rect(x, top + 2, width, _LANE - 4, title, **look)
    return [bar, text(letter, x + width / 2, top + 13, class_="in")] if letter and width > _LETTER_WIDTH else [bar]
