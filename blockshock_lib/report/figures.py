"""What every figure shares: canvas, headline, an honest empty figure, and `show` for notebooks."""

import base64
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import matplotlib as mpl
import numpy as np
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextToPath
from PIL import Image

from blockshock_lib import files

INK, MUTED, FAINT, PAPER = "#222222", "#6B6B6B", "#D9D9D9", "#FFFFFF"
DPI = 100
_RC = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.8),
    **{"axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.axisbelow": True},
    **{"font.size": 9, "grid.color": "#ECECEC", "hatch.linewidth": 0.6, "figure.facecolor": PAPER},
}


@contextmanager
def drawing(
    width: float, height: float, title: str, *parts: str, alt: str, note: str = "", rows: int = 1, columns=1, **how
) -> Iterator[tuple[Figure, np.ndarray]]:
    """A figure of `width` x `height` inches below its headline, not registered with pyplot, with rows x columns axes;
    `parts` make its subtitle, `note` is at the foot. matplotlib's settings hold while it is drawn: none global changes.
    """
    import seaborn as sns  # half a second, which only a drawing needs

    title = _wrap(title, width - 0.2, size=12, weight="bold")
    subtitle, note = _wrap(" · ".join(filter(None, parts)), width - 0.2, size=9), _wrap(note, width - 0.2, size=8)
    head = 0.16 + 0.22 * (title.count("\n") + 1) + 0.18 * (subtitle.count("\n") + 1 if subtitle else 0)
    foot = 0.06 + 0.16 * (note.count("\n") + 1) if note else 0
    total, left, down = height + head + foot, 0.08 / width, 0.11 + 0.22 * (title.count("\n") + 1)
    with sns.axes_style("ticks"), mpl.rc_context(_RC):
        fig = Figure(figsize=(width, total), dpi=DPI, layout="constrained")
        fig.get_layout_engine().set(rect=(0, foot / total, 1, 1 - (head + foot) / total))
        fig.text(left, 1 - 0.07 / total, title, fontsize=12, fontweight="bold", va="top", linespacing=1.15)
        fig.text(left, 1 - down / total, subtitle, fontsize=9, color=MUTED, va="top", linespacing=1.2)
        fig.text(left, 0.05 / total, note, fontsize=8, color=MUTED, va="bottom", linespacing=1.2)
        fig.alt = " ".join(f"{title}. {subtitle}. {alt} {note}".replace("..", ".").split())
        yield fig, fig.subplots(rows, columns, squeeze=False, **how)


def _wrap(text: str, width: float, **font) -> str:
    """`text` broken so that no line of it is wider than `width` inches in that font."""
    # Hinting at 100 dpi rounds each letter's width, which adds up to a few percent over the outline's.
    measure, prop, points = TextToPath(), FontProperties(**font), 0.94 * width * 72
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and measure.get_text_width_height_descent(longer, prop, ismath=False)[0] <= points:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def lines(ax: Axes, names: Sequence[str]) -> None:
    """A line of the y axis for each of `names`, the first lowest, without ticks and spine."""
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def legend(ax: Axes, looks: Mapping[str, dict]) -> None:
    """To the right of the axes, each name with a line that looks so."""
    handles = [ax.plot([], [], label=name, **look)[0] for name, look in looks.items()]
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)


def name_points(ax: Axes, points: Sequence[tuple[float, float]], names: Sequence[str], others: Sequence = ()) -> None:
    """`names` beside their points, where they cover least of each other, of the points and of `others`; a line leads to
    one that stands off. Last of all: the axes must have their limits.
    """
    ax.figure.draw_without_rendering()  # now the layout is known
    unit, size, inside = ax.figure.dpi / 72, 6.5, ax.get_window_extent().extents
    dots = ax.transData.transform([*points, *others])
    taken = np.hstack([dots - 4 * unit, dots + 4 * unit])  # boxes, in pixels
    turns = sorted(range(16), key=lambda turn: (turn % 4 != 2, turn % 2))  # diagonal first: bars are upright or level
    for dot, point, name in zip(dots, points, names, strict=False):
        box, found = np.array([0.6 * size * len(name), 1.1 * size]), []
        for far, turn in product((7, 14, 22, 32, 44), turns):
            off = far * np.array([np.cos(np.pi / 8 * turn), np.sin(np.pi / 8 * turn)])
            off[0] += box[0] / 2 * np.sign(off[0].round(3))
            made = np.hstack([dot + (off - box / 2) * unit, dot + (off + box / 2) * unit])
            out = np.prod(box * unit) - _shared(made, inside[None])
            found.append((_shared(made, taken) + 10 * out + far, far, *off, made))
        _, far, *off, made = min(found, key=lambda one: one[0])
        taken = np.vstack([taken, made])
        line = dict(arrowstyle="-", color=MUTED, linewidth=0.5, shrinkA=0, shrinkB=3) if far > 7 else None
        look = dict(ha="center", va="center", fontsize=size, color=INK, zorder=6, arrowprops=line)
        look["path_effects"] = [withStroke(linewidth=1.5, foreground=PAPER)]
        ax.annotate(name, point, off, textcoords="offset points", **look).set_in_layout(False)


def _shared(one: np.ndarray, boxes: np.ndarray) -> float:
    """The area of `boxes` (k, 4), left, low, right, top, that lies in `one`."""
    sides = np.minimum(one[2:], boxes[:, 2:]) - np.maximum(one[:2], boxes[:, :2])
    return float(sides.clip(0).prod(axis=1).sum())


def milliseconds(value: float, _position: int = 0) -> str:
    """0.00812 -> "8.1 µs", 12.7 -> "13 ms": two digits in the nearer unit."""
    for unit, name in ((1e3, "s"), (1, "ms"), (1e-3, "µs"), (1e-6, "ns")):
        if abs(value) >= unit * 0.995:
            scaled = value / unit
            return f"{scaled:.0f} {name}" if scaled >= 9.95 else f"{scaled:.1f}".removesuffix(".0") + f" {name}"
    return f"{value:g}"


def byte_text(value: float) -> str:
    """3355443200 -> "3.125 GiB": four digits in the nearest unit."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 0.9 * 1024**power:
            return f"{value / 1024**power:.4g} {name}"
    return f"{value:.0f} B"


def empty(title: str, why: str) -> Figure:
    with drawing(6.5, 0.9, title, "nothing to draw", alt=why) as (fig, grid):
        grid[0, 0].set_axis_off()
        grid[0, 0].text(0.5, 0.5, why, ha="center", va="center", color=MUTED, transform=grid[0, 0].transAxes)
    return fig


def png(fig: Figure, dpi: int = DPI) -> bytes:
    """The figure as a PNG of at most 256 colours: a third of the usual size, so that notebooks stay small."""
    raw = io.BytesIO()
    fig.savefig(raw, format="png", dpi=dpi, facecolor=PAPER)
    image = Image.open(raw).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    return small.getvalue()


_MOST = 100_000  # bytes of an SVG; what is beyond is a finer PNG
# What an SVG of matplotlib repeats and no reader needs: names of groups, the list of fonts, line breaks.
_LESS = ((rb'<g id="\w+">', b"<g>"), (rb"font-family: [^;]*; ", b""), (rb"\s*\n\s*", b"\n"))
_PLACES = re.compile(rb' (?:d|x|y)="[^"]*"')  # never a text, nor a scale
_FONT = b"<style>text{font-family:'DejaVu Sans',Verdana,sans-serif}</style></defs>"


def svg(fig: Figure) -> bytes:
    """The figure as an SVG without a background, the same bytes each time; places are cut to a tenth of a point."""
    raw = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "block-shock", "svg.fonttype": "none"}):
        fig.savefig(raw, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = _PLACES.sub(lambda place: re.sub(rb"(\.\d)\d+", rb"\1", place[0]), raw.getvalue())
    for long, short in _LESS:
        text = re.sub(long, short, text)
    return text.replace(b"</defs>", _FONT, 1)


def save(folder: Path, drawn: Mapping[str, Figure]) -> list[dict[str, str]]:
    """Writes every figure into `folder`/figures as a PNG; their names, files and alternative texts for a manifest."""
    saved = []
    for name, fig in drawn.items():
        file = f"figures/{re.sub(r'[^A-Za-z0-9_+-]+', '-', name)}.png"
        files.write_atomic(folder / file, png(fig))
        saved.append({"name": name, "file": file, "alt": getattr(fig, "alt", "")})
    return saved


# Where JupyterLab is dark, light and dark change places and colours keep their hue; a page has a style of its own.
_DARK = (
    "<style>[data-jp-theme-light=false] .bs-figure{filter:invert(1) hue-rotate(180deg);mix-blend-mode:screen}</style>"
)


def show(fig: Figure) -> HTML:
    """The figure as an HTML image with its alternative text, `fig.alt`."""
    data, kind = svg(fig), "svg+xml"
    if len(data) > _MOST:
        data, kind = png(fig, 2 * DPI), "png"
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    width, alt = round(fig.get_figwidth() * DPI), html.escape(getattr(fig, "alt", ""))
    return HTML(f'{_DARK}<img alt="{alt}" class="bs-figure" width="{width}" style="max-width:100%" src="{source}">')
