"""What every figure shares: canvas, headline, an honest empty figure, and `show` for notebooks."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
import matplotlib.pyplot as plt
import seaborn as sns
from IPython.display import HTML
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from PIL import Image

INK, MUTED, FAINT, PAPER = "#222222", "#6B6B6B", "#D9D9D9", "#FFFFFF"
DPI = 100
_RC = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#ECECEC",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
}


@contextmanager
def theme() -> Iterator[None]:
    """matplotlib settings of all figures, for the time of one drawing; nothing global is changed."""
    with sns.axes_style("ticks"), mpl.rc_context(_RC):
        yield


def canvas(width: float, height: float, title: str, subtitle: str, alt: str, note: str = "") -> Figure:
    """A figure of `width` x `height` inches below its headline; `note` is one small line at the foot.

    The figure is not registered with pyplot: it leaks no window and a notebook cell does not draw it twice.
    """
    title = _wrap(title, width - 0.2, size=12, weight="bold")
    subtitle = _wrap(subtitle, width - 0.2, size=9)
    note = _wrap(note, width - 0.2, size=8)
    head = 0.16 + 0.22 * (title.count("\n") + 1) + 0.18 * (subtitle.count("\n") + 1 if subtitle else 0)
    foot = 0.06 + 0.16 * (note.count("\n") + 1) if note else 0
    total = height + head + foot
    fig = Figure(figsize=(width, total), dpi=DPI, layout="constrained")
    fig.get_layout_engine().set(rect=(0, foot / total, 1, 1 - (head + foot) / total))
    left = 0.08 / width
    fig.text(left, 1 - 0.07 / total, title, fontsize=12, fontweight="bold", va="top", linespacing=1.15)
    down = 0.11 + 0.22 * (title.count("\n") + 1)
    fig.text(left, 1 - down / total, subtitle, fontsize=9, color=MUTED, va="top", linespacing=1.2)
    if note:
        fig.text(left, 0.05 / total, note, fontsize=8, color=MUTED, va="bottom", linespacing=1.2)
    fig.alt = " ".join(f"{title}. {subtitle}. {alt} {note}".replace("..", ".").split())
    return fig


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


def legend_below(fig: Figure, handles: list, most: int, **look) -> None:
    """A legend below the axes in as many columns, at most `most`, as the figure is wide enough for."""
    for columns in range(min(most, len(handles)), 0, -1):
        legend = fig.legend(handles=handles, loc="outside lower center", ncols=columns, **look)
        if columns == 1 or legend.get_window_extent().width <= fig.bbox.width:
            return
        legend.remove()


def empty(title: str, why: str) -> Figure:
    """A figure that says that there is nothing to draw, and why."""
    with theme():
        fig = canvas(6.5, 0.9, title, "nothing to draw", why)
        ax = fig.subplots()
        ax.set_axis_off()
        ax.text(0.5, 0.5, why, ha="center", va="center", color=MUTED, transform=ax.transAxes)
    return fig


def subtitle(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def png(fig: Figure) -> bytes:
    """The figure as a PNG of at most 256 colours: a third of the usual size, so that notebooks stay small."""
    raw = io.BytesIO()
    fig.savefig(raw, format="png", dpi=DPI, facecolor=PAPER)
    image = Image.open(raw).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def show(fig: Figure, alt: str | None = None) -> HTML:
    """The figure as an HTML image with alternative text (`fig.alt` unless `alt` is given); closes the figure."""
    text = alt if alt is not None else getattr(fig, "alt", "")
    data = base64.b64encode(png(fig)).decode("ascii")
    plt.close(fig)
    return HTML(f'<img alt="{html.escape(text)}" style="max-width:100%" src="data:image/png;base64,{data}">')
