"""What others wrote, made inert: HTML by nh3, where what is known to be harmless stays, and text of a terminal.

A notebook's outputs and Markdown may come from a colleague's zip. No script, handler, frame, form or style survives,
and no link but to a page, a mailbox or a file nearby. A page's policy (page.py) would refuse them once more.
"""

import base64
import re
from collections.abc import Callable

import nh3
from bs4 import BeautifulSoup, Tag
from markupsafe import Markup, escape

from blockshock_lib.notebook.pages import tables

MOST, MOST_TEXT = 500_000, 100_000  # characters of one output's markup, its images apart, and of its text
DEEPEST = 200  # elements inside one another: the time to clean them grows with the square


def _words(text: str) -> set[str]:
    return set(text.split())


TAGS = _words(
    "a abbr b blockquote br caption cite code col colgroup dd del details dfn div dl dt em figcaption figure h1 h2 h3 "
    "h4 h5 h6 hr i img ins kbd li mark ol p pre q s samp small span strong sub summary sup table tbody td tfoot th "
    "thead tr u ul var"
)
# Of these the content goes too: it is no text for a reader, or it is one only where the element works.
_WITH_CONTENT = _words(
    "script style template iframe frame frameset noframes object embed applet svg math noscript noembed title "
    "textarea xmp plaintext listing select option button input audio video canvas dialog portal link meta base"
)
_VOID = _words("area base br col embed hr img input link meta param source track wbr")
# The classes that the style knows: ours, pandas', and the short ones of pygments.
_CLASS = re.compile(
    r"left|short|long|dataframe|scroll|table|figure|note|heading|highlight|bs-figure|same|pin|anchor|muted|"
    r"answer|sentence|chip|claim|good|bad|warn|supported|refuted|undecided|[a-z][a-z0-9]{0,2}"
)
FIGURE = "bs-figure"  # an image of ours, which changes with the page's colours
_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|svg\+xml);base64,[A-Za-z0-9+/=\s]+")
# What an SVG may not hold, although a browser runs and fetches nothing for an image: it might be opened by itself.
_ACTIVE = re.compile(
    rb"<!entity|<\?xml-stylesheet|<!doctype[^>]*\[|[<:](?:script|foreignobject|iframe|a|animate|set)\b|\bon\w+\s*=\s*['\"]|&#|"
    rb"javascript:|@import|href\s*=\s*.(?!#|data:image/png;base64,)|url\(\s*['\"]?(?!#)",
    re.I,
)
_LINK = re.compile(r"(?:https?://|mailto:)[^\s\\]+|#[^\s\\]*|(?![/\\]{2})[^\s:\\]*(?:[?#][^\s\\]*)?", re.I)
_DATA = re.compile(r"data:image/[^\"'\s>]*")
_ELEMENT = re.compile(r"<(/?)([A-Za-z][^\s/>]*)")
# Of a terminal's text: colours, moves and links; and whatever else is no text, of which a browser shows as little.
_ESCAPE = re.compile(r"\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)|\[[0-?]*[ -/]*[@-~])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# (tag, attribute) -> whether a value of it is harmless; what is not here goes.
_ATTRIBUTES: dict[tuple[str, str], Callable[[str], object]] = {
    ("a", "href"): _LINK.fullmatch,
    ("a", "title"): bool,
    ("img", "src"): _IMAGE.fullmatch,
    ("img", "alt"): bool,
    ("img", "width"): re.compile(r"\d{1,4}").fullmatch,
    ("details", "open"): lambda value: True,
    ("div", "role"): "region".__eq__,
    ("div", "tabindex"): "0".__eq__,
    ("pre", "tabindex"): "0".__eq__,
    ("div", "aria-label"): bool,
    ("th", "scope"): re.compile(r"col|row|colgroup|rowgroup").fullmatch,
    ("ol", "start"): re.compile(r"\d{1,6}").fullmatch,
    **{(tag, name): re.compile(r"\d{1,4}").fullmatch for tag in ("td", "th") for name in ("colspan", "rowspan")},
    **{(f"h{level}", "id"): re.compile(r"[a-z0-9][a-z0-9-]*").fullmatch for level in range(1, 7)},
}
_NAMES = {tag: {name for owner, name in _ATTRIBUTES if owner == tag} | {"class"} for tag in TAGS}


def clean(html: str, *, cell: str, heading: Callable[[Tag], None] | None = None) -> Markup:
    """`html` with nothing active in it.

    Tables get a box to scroll in and headers that say of what, images an alternative text where they have none (the
    name of the `cell`), and code a place in the order of the Tab key. `heading` is called with each heading, to number
    or remove it; without it, they become paragraphs.
    """
    size = len(_DATA.sub("", html))
    if size > MOST:
        return Markup('<p class="note">An output of {} characters is left out.</p>').format(size)
    if _depth(html) > DEEPEST:
        return escape(html)
    soup = BeautifulSoup(_inert(html, own=False), "html.parser")
    _prepare(soup, cell, heading)
    return Markup(_inert(str(soup), own=True))


def _inert(html: str, own: bool) -> str:
    """`html` by nh3: at first without others' classes and ids; then with our `own` attributes."""

    def kept(tag: str, name: str, value: str) -> str | None:
        if name == "class":
            return " ".join(one for one in value.split() if _CLASS.fullmatch(one)) or None
        if not own and name in ("id", "role", "tabindex", "aria-label"):
            return None
        if not own and (tag, name) == ("img", "src"):
            return value  # what is no embedded picture becomes a note
        rule = _ATTRIBUTES.get((tag, name))  # nh3 also asks about what it removes
        return value if rule is not None and rule(value) else None

    return nh3.clean(
        html,
        tags=TAGS,
        clean_content_tags=_WITH_CONTENT,
        attributes=_NAMES,
        attribute_filter=kept,
        url_schemes={"http", "https", "mailto", "data"},  # data: in images only, see _ATTRIBUTES
        link_rel=None,
    )


def _depth(html: str) -> int:  # of elements inside one another, counted without a parser
    depth = deepest = 0
    for match in _ELEMENT.finditer(html):
        depth += 0 if match[2].lower() in _VOID else -1 if match[1] else 1
        depth, deepest = max(0, depth), max(deepest, depth)
    return deepest


def _prepare(soup: BeautifulSoup, cell: str, heading: Callable[[Tag], None] | None) -> None:
    for tag in soup.find_all(re.compile(r"^h[1-6]$")):
        if heading is None:
            tag.name, tag["class"] = "p", "heading"
        else:
            heading(tag)
    for image in soup.find_all("img"):
        image["alt"] = image.get("alt", "").strip() or f"figure of {cell}"
        if not _harmless(image.get("src", "")):
            note = soup.new_tag("span", attrs={"class": "note"})
            note.string = f"[{image['alt']}: not shown, for it is no embedded PNG, JPEG, GIF or plain SVG]"
            image.replace_with(note)
    for table in soup.find_all("table"):
        tables.prepare(table)
    for kind, found in {"table": soup.find_all("table"), "figure": soup.find_all("img", class_=FIGURE)}.items():
        for one in found:
            if one.find_parent("table") is None:
                box = {"class": f"scroll {kind}", "role": "region", "tabindex": "0", "aria-label": f"{kind} of {cell}"}
                one.wrap(soup.new_tag("div", attrs=box))
    for block in soup.find_all("pre"):
        block["tabindex"] = "0"


def _harmless(source: str) -> bool:
    """Whether this is an embedded picture, and one that holds nothing active."""
    if not _IMAGE.fullmatch(source) or not source.startswith("data:image/svg"):
        return bool(_IMAGE.fullmatch(source))
    try:
        text = base64.b64decode(source.partition(",")[2])
    except ValueError:
        return False
    return not (_ACTIVE.search(text) or b"\0" in text)  # UTF-16 would hide words from the search


def terminal(text: str) -> Markup:
    """`text`, escaped, without colours, progress bars as they ended. Empty where nothing was left."""
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}\n[{len(text) - MOST_TEXT} more characters are left out]"
    # A carriage return goes back to a line's start, as progress bars do.
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")).strip("\n")
    text = _CONTROL.sub("", _ESCAPE.sub("", text))
    return escape(text) if text.strip() else Markup("")
