"""What a program wrote to a terminal, as HTML: its colours as classes, its progress bars as they stood in the end."""

from __future__ import annotations

import re

from markupsafe import Markup
from nbconvert.filters.ansi import ansi2html

MOST = 100_000  # characters of one output that a page shows

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_LINKS = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# Whatever else is no text: a browser shows none of it, and neither did the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")


def html(text: str) -> Markup:
    """`text`, escaped, its ANSI colours as spans of classes (`ansi-red-fg` and so on); empty where nothing was left.

    Only the eight named colours are kept, and no background: the page chooses shades that can be read in both schemes.
    """
    if len(text) > MOST:
        text = f"{text[:MOST]}\n[{len(text) - MOST} more characters are left out]"
    text = _CONTROL.sub("", _LINKS.sub("", _overwritten(text)))
    text = _COLOUR.sub(lambda match: f"\x1b[{_named(match[1])}m", text)
    return Markup(ansi2html(text).replace("\x1b", "")) if text.strip() else Markup("")


def _overwritten(text: str) -> str:
    """Each line as a terminal leaves it: a carriage return goes back to its start, as progress bars do."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(lines).strip("\n")


def _named(codes: str) -> str:
    """The codes of one sequence with each colour as its nearest named one, and without backgrounds."""
    numbers = [int(code[:4] or 0) for code in codes.split(";")]
    kept: list[int] = []
    while numbers:
        code = numbers.pop(0)
        if code in (38, 48) and numbers:
            colour = _rgb(numbers)
            if code == 38 and colour is not None:
                kept.append(_nearest(*colour))
        elif code in (0, 1, 4, 21, 22, 24, 39) or 30 <= code <= 37 or 90 <= code <= 97:
            kept.append(code)
    return ";".join(map(str, kept)) if kept else "22"  # 22, no longer bold, where an empty one would reset all


def _rgb(numbers: list[int]) -> tuple[int, int, int] | None:
    # Takes 5;n (a palette of 256) or 2;r;g;b from the front.
    kind = numbers.pop(0)
    if kind == 2 and len(numbers) >= 3:
        return numbers.pop(0), numbers.pop(0), numbers.pop(0)
    if kind != 5 or not numbers:
        return None
    n = numbers.pop(0)
    if n < 16:
        return tuple((255 if n >= 8 else 170) * (n >> bit & 1) for bit in range(3))
    if n < 232:
        return tuple((0, 95, 135, 175, 215, 255)[(n - 16) // 6**power % 6] for power in (2, 1, 0))
    return (8 + 10 * (n - 232),) * 3


def _nearest(red: int, green: int, blue: int) -> int:
    """The code, 31 to 36, of the named colour with this hue; 39, the text's own, for what is nearly grey."""
    parts = (red, green, blue)
    if max(parts) - min(parts) < 40:
        return 39
    middle = (max(parts) + min(parts)) / 2
    return 30 + sum((part > middle) << bit for bit, part in enumerate(parts))
