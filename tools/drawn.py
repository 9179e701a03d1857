"""Whether two executed notebooks, or folders of them, show the same: `python -m tools.drawn OLD NEW`.

Tables and printed text are compared as they are read, figures by their pixels, or their bytes where they are SVG;
paths, dates and the cells' sources are not. What differs is printed, and is the exit status.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import html
import io
import json
import re
import sys
from pathlib import Path

from PIL import Image

# Folders of runs and what lies in them, times of day, durations of a run, addresses of objects.
_VOLATILE = (
    (re.compile(r"(?:/|\b(?:outputs|notebooks)/)[\w.+/-]*[\w+-]"), "<path>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<date>"),
    (re.compile(r"\b\d{6}-(?=[a-z])"), "<time>-"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
)
_PICTURE = re.compile(r'<img alt="([^"]*)"[^>]*?src="data:image/(?:png|svg\+xml);base64,([A-Za-z0-9+/=]+)"[^>]*>')


def outputs(notebook: Path) -> list[tuple[str, str]]:
    """(kind, content) of everything that the notebook shows, in order; a figure is the digest of its pixels."""
    shown: list[tuple[str, str]] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                shown.append((output["name"], plain("".join(output["text"]))))
            elif output["output_type"] == "error":
                shown.append(("error", f"{output['ename']}: {output['evalue']}"))
            else:
                shown += _data(output["data"])
    return [part for part in shown if part[1].strip()]


def _data(data: dict) -> list[tuple[str, str]]:
    if "image/png" in data:
        return [("figure", _pixels("".join(data["image/png"])))]
    if "text/html" not in data:
        return [("text", plain("".join(data.get("text/plain", ""))))]
    text = "".join(data["text/html"])
    figures = [
        part for alt, image in _PICTURE.findall(text) for part in (("figure", _pixels(image)), ("alt", plain(alt)))
    ]
    return [*figures, ("html", plain(_PICTURE.sub("", text)))]


def _pixels(image: str) -> str:
    data = base64.b64decode(image)
    if not data.startswith(b"\x89PNG"):  # an SVG, which is drawn with the same bytes each time
        return f"SVG {hashlib.sha256(data).hexdigest()[:16]}"
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return f"{picture.width}x{picture.height} {hashlib.sha256(picture.tobytes()).hexdigest()[:16]}"


def plain(text: str) -> str:
    """`text` as it is read: a table with a line a row, without tags, and without what may differ."""
    if "<" in text:
        text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
        text = re.sub(r"</t[dh]>\s*", " | ", re.sub(r"</tr>\s*", "\n", text))
        text = re.sub(r"<[^>]+>", " ", text)
    text = html.unescape(text)
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def differences(old: Path, new: Path) -> list[str]:
    """What the two notebooks show differently, in words."""
    a, b = outputs(old), outputs(new)
    lines: list[str] = []
    for step, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if step != "equal":
            before, after = (
                [f"[{kind}] {line}" for kind, text in part for line in text.splitlines()] for part in (a[i:j], b[k:m])
            )
            lines += list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return lines


def notebooks(place: Path) -> dict[str, Path]:
    """Name -> executed notebook: below a folder the name of its run without date, and its own."""
    if place.is_file():
        return {"": place}
    paths = (path for path in sorted(place.rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts)
    return {f"{re.sub(r'^[0-9]+-', '', path.parent.name)}/{path.name}": path for path in paths}


def main(old: Path, new: Path) -> int:
    """Prints every difference; the number of notebooks that differ or that only one side has."""
    sides, wrong = (notebooks(old), notebooks(new)), 0
    for name in sorted({*sides[0], *sides[1]}):
        if missing := [place for place, side in zip((old, new), sides, strict=True) if name not in side]:
            print(f"{name}: not in {missing[0]}")
            wrong += len(sides[1]) > 1 or missing[0] == old  # one of several drawn again may be compared alone
            continue
        lines = differences(sides[0][name], sides[1][name])
        wrong += bool(lines)
        print(f"{name}: {'differs' if lines else 'the same'}", *(f"    {line[:300]}" for line in lines), sep="\n")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m tools.drawn OLD NEW")
    sys.exit(min(1, main(Path(sys.argv[1]), Path(sys.argv[2]))))
