"""HTML that others wrote, made inert: what is known to be harmless stays, everything else goes.

A notebook's outputs and Markdown may come from a colleague's zip. No script, handler, frame, form or style survives,
and no link but to a page, a mailbox or a file nearby. A page's policy (web.py) would refuse them once more. bleach has
the last word on every byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import bleach
from bs4 import BeautifulSoup, Tag
from bs4.element import PreformattedString
from markupsafe import Markup, escape

MOST = 500_000  # characters of one output's markup, its images apart: beyond that nobody reads it
DEEPEST = 200  # elements inside one another

_TEXT = (
    *(
        "a",
        "abbr",
        "b",
        "blockquote",
        "br",
        "caption",
        "cite",
        "code",
        "dd",
        "del",
        "details",
        "dfn",
        "div",
        "dl",
        "dt",
    ),
    *("em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "ins", "kbd", "li", "mark"),
    *("ol", "p", "pre", "q", "s", "samp", "small", "span", "strong", "sub", "summary", "sup", "u", "ul", "var"),
)
_TABLE = ("table", "thead", "tbody", "tfoot", "tr", "th", "td", "colgroup", "col")
TAGS = frozenset((*_TEXT, *_TABLE))
# Of these the content goes too: it is no text for a reader, or it is one only where the element works.
_WITH_CONTENT = (
    *("script", "style", "template", "iframe", "frame", "frameset", "noframes", "object", "embed", "applet", "svg"),
    *("math", "noscript", "noembed", "title", "textarea", "xmp", "plaintext", "listing", "select", "option", "button"),
    *("input", "audio", "video", "canvas", "dialog", "portal", "link", "meta", "base"),
)
_ALIGNED = {"left": "left", "start": "left", "right": "right", "end": "right", "center": "center"}
# The classes that the style knows: ours, pandas', and the short ones of pygments.
_CLASS = re.compile(r"left|right|center|short|long|dataframe|scroll|note|heading|highlight|[a-z][a-z0-9]{0,2}")
_NUMBER = re.compile(r"[-+−~<>≤≥]?\s*\.?\d|nan|none|[-–…]|\.\.\.|$", re.I)
_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif);base64,[A-Za-z0-9+/=\s]+")
_LINK = re.compile(r"(?:https?://|mailto:)[^\s\\]+|#[^\s\\]*|(?![/\\]{2})[^\s:\\]*(?:[?#][^\s\\]*)?", re.I)
_DATA = re.compile(r"data:image/[^\"'\s>]*")
_TAG = re.compile(r"""<(?>!--.*?-->|[!?][^>]*>|/?[A-Za-z](?>"[^"]*"|'[^']*'|[^>"'])*+>)""", re.S)
_OPENS = frozenset("!?/abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LONE = re.compile(r"&(?!#?[0-9A-Za-z]{1,32};)")
_ATTRIBUTES: dict[tuple[str, str], Callable[[str], object]] = {
    ("a", "href"): _LINK.fullmatch,
    ("a", "title"): bool,
    ("img", "src"): _IMAGE.fullmatch,
    ("img", "alt"): bool,
    ("details", "open"): lambda value: True,
    ("div", "role"): "region".__eq__,
    ("div", "tabindex"): "0".__eq__,
    ("pre", "tabindex"): "0".__eq__,
    ("div", "aria-label"): bool,
    ("th", "scope"): re.compile(r"col|row|colgroup|rowgroup").fullmatch,
    ("ol", "start"): re.compile(r"\d{1,6}").fullmatch,
    **{(tag, name): re.compile(r"\d{1,4}").fullmatch for tag in ("td", "th") for name in ("colspan", "rowspan")},
    **{(f"h{level}", "id"): re.compile(r"part-\d+").fullmatch for level in range(1, 7)},
}


def clean(html: str, *, cell: str, heading: Callable[[Tag], None] | None = None) -> Markup:
    """`html` with nothing active in it.

    Tables get a box to scroll in and headers that say of what, images an alternative text where they have none, and
    code a place in the order of the Tab key. Images that are no embedded PNG, JPEG or GIF become a note.

    Args:
        cell: names the place, as in "cell 3", for what has no name of its own.
        heading: called with each heading, to number or remove it; without it, headings become bold paragraphs.
    """
    size = len(_DATA.sub("", html))
    if size > MOST:
        return Markup('<p class="note">An output of {} characters is left out.</p>').format(size)
    try:
        soup = BeautifulSoup(_whole_tags(html), "html.parser")
        if _is_deep(soup):
            return escape(html)
        _prepare(soup, cell, heading)
        safe = bleach.clean(
            str(soup),
            tags=TAGS,
            attributes=_allowed,
            protocols={"http", "https", "mailto", "data"},  # data: in images only, see _ATTRIBUTES
            strip=True,
            strip_comments=True,
        )
    except RecursionError:
        return escape(html)
    return Markup(safe)


def _whole_tags(html: str) -> str:
    """`html` with whole tags only: comments and declarations left out, any other "<" and any lone "&" made text.

    The parsers of Python and bleach take minutes for some 100 KB of broken ones.
    """
    kept, place = [], 0
    while (start := html.find("<", place)) >= 0:
        kept.append(html[place:start])
        tag, place = _TAG.match(html, start), start + 1
        if tag is None and html[place : place + 1] not in _OPENS:
            kept.append("&lt;")
        elif tag is None:  # its end is nowhere, so no later one has an end either, or none that matters
            kept.append(html[start:].replace("<", "&lt;"))
            place = len(html)
        else:
            kept.append("" if tag[0][1] in "!?" else tag[0])
            place = tag.end()
    return _LONE.sub("&amp;", "".join([*kept, html[place:]]))


def _is_deep(soup: BeautifulSoup) -> bool:
    # Nested deeper than anyone means it: the time to clean it grows with the square.
    depth = {id(soup): 0}
    for node in soup.descendants:
        depth[id(node)] = depth[id(node.parent)] + 1
    return max(depth.values()) > DEEPEST


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "class":
        return all(map(_CLASS.fullmatch, value.split()))
    rule = _ATTRIBUTES.get((tag, name))
    return rule is not None and bool(rule(value))


def _prepare(soup: BeautifulSoup, cell: str, heading: Callable[[Tag], None] | None) -> None:
    for node in soup.find_all(string=lambda text: isinstance(text, PreformattedString)):
        node.extract()  # comments, declarations and their like
    for tag in soup.find_all(_WITH_CONTENT):
        tag.decompose()
    for tag in soup.find_all(True):
        aligned = re.search(r"(?:^|;)\s*text-align\s*:\s*([a-z]+)", _one(tag.get("style")), re.I)
        kept = [name for name in _one(tag.get("class")).split() if _CLASS.fullmatch(name)]
        if aligned and aligned[1].lower() in _ALIGNED:
            kept.append(_ALIGNED[aligned[1].lower()])
        for name in ("id", "style", "class", "role", "tabindex"):
            tag.attrs.pop(name, None)
        if kept:
            tag["class"] = " ".join(kept)
    for tag in soup.find_all(re.compile(r"^h[1-6]$")):
        if heading is not None:
            heading(tag)
        else:
            tag.name, tag["class"] = "p", "heading"
    for image in soup.find_all("img"):
        _name_image(soup, image, cell)
    for table in soup.find_all("table"):
        _name_headers(table)
        _align(table)
        if table.find_parent("table") is None:
            label = f"table of {cell}"
            table.wrap(
                soup.new_tag("div", attrs={"class": "scroll", "role": "region", "tabindex": "0", "aria-label": label})
            )
    for block in soup.find_all("pre"):
        block["tabindex"] = "0"


def _name_image(soup: BeautifulSoup, image: Tag, cell: str) -> None:
    alt = _one(image.get("alt")).strip() or f"figure of {cell}"
    if _IMAGE.fullmatch(_one(image.get("src"))):
        image["alt"] = alt
        return
    note = soup.new_tag("span", attrs={"class": "note"})
    note.string = f"[{alt}: not shown, for it is no embedded PNG, JPEG or GIF]"
    image.replace_with(note)


def _name_headers(table: Tag) -> None:
    for header in table.find_all("th"):
        if not header.get("scope"):
            header["scope"] = "col" if header.find_parent("thead") is not None else "row"


def _align(table: Tag) -> None:
    """Columns of words to the left, which pandas puts to the right like numbers; short cells on one line, long wide."""
    rows = [row.find_all(["td", "th"], recursive=False) for row in table.find_all("tr")]
    width = max(map(len, rows), default=0)
    if any(cell.get("colspan") or cell.get("rowspan") for row in rows for cell in row):
        width = 0  # then a cell's place in its row does not say its column
    for place in range(width):
        column = [row[place] for row in rows if len(row) == width]
        texts = [cell.get_text().strip() for cell in column if cell.name == "td"]
        if texts and not all(len(text) < 40 and _NUMBER.match(text) for text in texts):
            for cell in column:
                cell["class"] = "left"
    for cell in (cell for row in rows for cell in row):
        length = len(cell.get_text().strip())
        wanted = "long" if length > 60 else "short" if length < 30 and cell.get("scope") != "col" else ""
        cell["class"] = f"{_one(cell.get('class'))} {wanted}".strip()


def _one(value: object) -> str:
    # bs4 gives a list for class and its like, and None for what is missing.
    return " ".join(value) if isinstance(value, list) else str(value or "")
