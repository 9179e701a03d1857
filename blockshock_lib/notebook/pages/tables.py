"""A table of a notebook as its page shows it: one row of headers, no running index, one unit of time, no NaN."""

import re
import statistics
from copy import copy
from decimal import Decimal

from bs4 import Tag

_NUMBER = re.compile(r"[-+−~<>≤≥]?\s*\.?\d|nan|none|[-–…]|\.\.\.|$", re.I)  # how a cell of a column of numbers begins
_PLAIN = re.compile(r"[-+]?\d{1,20}(?:\.\d{1,20})?(?:e[-+]?\d\d?)?", re.I)
_ABSENT = ("NaN", "nan", "None", "NaT", "<NA>")
_TIME = " (ms)"
MOST = 100_000  # cells that a table is made to have where its cells span rows


def prepare(table: Tag) -> None:
    """Changes `table` in place; one without rows becomes a sentence. Where cells span columns, a cell's place does
    not say its column, and only headers get their scope.
    """
    for header in table.find_all("th"):
        header["scope"] = header.get("scope") or ("col" if header.find_parent("thead") is not None else "row")
    body = [row for row in table.find_all("tr") if row.find_parent("thead") is None]
    head = [row for row in table.find_all("tr") if row.find_parent("thead") is not None]
    if head and not any(_cells(row) for row in body):
        heads = dict.fromkeys(cell.get_text(" ", strip=True) for row in head for cell in _cells(row))
        of = ", ".join(filter(None, heads)) or "this table"
        table.name, table["class"], table.string = "p", ["note"], f"Nothing to list: no row of {of}."
        return
    cells = [cell for row in (*head, *body) for cell in _cells(row)]
    spans = sum(int(cell.get("rowspan", 1)) for cell in cells)
    if spans <= MOST and not any(cell.get("colspan", "1") != "1" for cell in cells):
        _fill(body)
        _one_head(head)
        _drop_index(head, body)
        _scale(head, body)
        for column in zip(*map(_cells, (*head, *body)), strict=False):  # pandas puts words at the right, like numbers
            words = [_text(cell) for cell in column if cell.get("scope") != "col"]
            if not all(len(word) < 40 and _NUMBER.match(word) for word in words):
                for cell in column:
                    cell["class"] = ["left"]
        before: list[str] = []
        for row in body:
            before = _say(_cells(row), before)
        first = [_text(_cells(row)[0]) for row in body if _cells(row)]
        table["class"] = [*table.get("class", []), *["pin"] * all(len(text) < 30 for text in first)]
    for cell in table.find_all(["td", "th"]):
        length = len(_text(cell))
        if wanted := "long" if length > 60 else "short" if length < 30 and cell.get("scope") != "col" else "":
            cell["class"] = [*cell.get("class", []), wanted]


def _cells(row: Tag) -> list[Tag]:
    return row.find_all(["td", "th"], recursive=False)


def _text(cell: Tag) -> str:
    return cell.get_text().strip()


def _fill(body: list[Tag]) -> None:
    """Writes a cell that spans rows into each of them: rows can then be sorted."""
    spans: dict[int, tuple[int, Tag]] = {}
    for row in body:
        for place in sorted(spans):
            left, cell = spans.pop(place)
            before = _cells(row)[:place]  # fewer where rows are not of one length
            before[-1].insert_after(copy(cell)) if before else row.insert(0, copy(cell))
            spans |= {place: (left - 1, cell)} if left > 1 else {}
        for place, cell in enumerate(_cells(row)):
            if (rows := int(cell.attrs.pop("rowspan", 1))) > 1:
                spans[place] = (rows - 1, cell)


def _one_head(head: list[Tag]) -> None:
    # pandas writes the names of an index in a row of their own, below those of the columns.
    if len(head) == 2 and len(_cells(head[0])) == len(_cells(head[1])):
        pairs = list(zip(_cells(head[0]), _cells(head[1]), strict=True))
        if not any(_text(above) and _text(below) for above, below in pairs):
            for above, below in pairs:
                above.string = _text(above) or _text(below)
            head.pop().decompose()


def _drop_index(head: list[Tag], body: list[Tag]) -> None:
    rows = [_cells(row) for row in (*head, *body)]
    numbers = [_text(cells[0]) if cells and cells[0].name == "th" else "" for cells in rows[len(head) :]]
    if len(head) == 1 and rows[0] and not _text(rows[0][0]) and numbers == [str(n) for n in range(len(body))]:
        for cells in rows:
            cells[0].decompose()


def _scale(head: list[Tag], body: list[Tag]) -> None:
    """All times of a table in µs where half of them are below 1 ms, so that its columns can be compared."""
    headers = _cells(head[0]) if len(head) == 1 else []
    places = [place for place, header in enumerate(headers) if _text(header).endswith(_TIME)]
    times = [cells[place] for cells in map(_cells, body) if len(cells) == len(headers) for place in places]
    numbers = [abs(float(number)) for cell in times for number in _numbers(cell)]
    if numbers and statistics.median(numbers) < 1:
        for place in places:
            headers[place].string = _text(headers[place]).removesuffix(_TIME) + " (µs)"
        for cell in filter(_numbers, times):
            cell.string = _PLAIN.sub(lambda found: str(1000 * Decimal(found[0])), _text(cell))


def _numbers(cell: Tag) -> list[str]:
    """The numbers of a cell that holds nothing else: one, or the ends of a range."""
    parts = _text(cell).split("–")
    return parts if all(_PLAIN.fullmatch(part) for part in parts) else []


def _say(cells: list[Tag], before: list[str]) -> list[str]:
    """Writes a row's numbers as people do; that with which the row `before` began too, it says faintly."""
    same = len(cells) > 1
    for place, cell in enumerate(cells):
        if _text(cell) in _ABSENT:
            cell.string = "–"
        elif numbers := _numbers(cell):
            cell.string = "–".join(map(_readable, numbers))
        same = same and place < len(cells) - 1 and before[place : place + 1] == [_text(cell)]
        if same:
            cell["class"] = [*cell.get("class", []), "same"]
    return [_text(cell) for cell in cells]


def _readable(text: str) -> str:
    """ "5874000" -> "5,874,000", "0.000016" -> "1.6e-5", "12.500" -> "12.5": pandas' zeros at the end are padding."""
    value = Decimal(text)
    if 0 < abs(value) < Decimal("0.001"):
        digits, _, power = f"{value.normalize():e}".partition("e")
        return f"{digits}e{int(power)}"
    plain = f"{value:,f}" if abs(value) >= 10_000 else f"{value:f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
