"""Pictures as text: SVG that stands in a page and takes its colours from the page's style.

Colours are those of Okabe and Ito, which people who confuse red and green can tell apart; what is said by a colour is
said by a place, a letter or a title as well.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

WIDTH = 960
"""Of every picture, in its own units; a page scales it."""

CSS = """
:root { --text: #222; --faint: #666; --line: #ccc; --paper: #fff; --c6: #9a9a9a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e4e4; --faint: #a0a0a0; --line: #444; --paper: #17191c; --c6: #7d7d7d; }
}
svg { display: block; width: 100%; max-width: 70em; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .faint { fill: var(--faint); } svg .name { font-weight: 600; }
svg .rule { stroke: var(--line); fill: none; } svg .dash { stroke-dasharray: 3 3; } svg .mark { stroke: var(--text); }
svg .area { stroke: var(--paper); stroke-width: 0.4; } svg .in { fill: #000; font-size: 10px; text-anchor: middle; }
.c0 { fill: #0072b2; } .c1 { fill: #56b4e9; } .c2 { fill: #009e73; } .c3 { fill: #e69f00; } .c4 { fill: #cc79a7; }
.c5 { fill: #f0e442; } .c6 { fill: var(--c6); } .c7 { fill: #d55e00; } .none { fill: var(--line); }
.launch { fill: var(--faint); }
"""


def tag(name: str, content: str = "", **attributes: object) -> str:
    """One element; `content` is markup already. An underscore at the end of an attribute's name is dropped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_short(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>"


def text(words: str, x: float, y: float, **attributes: object) -> str:
    """Words with their baseline's beginning, or what `text_anchor` says, at a point."""
    return tag("text", html.escape(words), x=x, y=y, **attributes)


def rect(x: float, y: float, width: float, height: float, title: str = "", **attributes: object) -> str:
    """A rectangle that tells its title to a pointer."""
    inner = tag("title", html.escape(title)) if title else ""
    return tag("rect", inner, x=x, y=y, width=width, height=height, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, class_: str = "rule") -> str:
    """A straight line."""
    return tag("path", d=f"M{_short(x1)} {_short(y1)}L{_short(x2)} {_short(y2)}", class_=class_)


def picture(parts: Iterable[str], height: float, label: str) -> str:
    """All parts together; `label` is for those who cannot see it."""
    return tag(
        "svg",
        "\n".join(parts),
        viewBox=f"0 0 {WIDTH} {_short(height)}",
        role="img",
        aria_label=label,
    )


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
