"""What a command says while it works: a line on a terminal, elsewhere one every few seconds; and colours."""

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FIRST, EVERY = 0.3, 8.0  # seconds to the first plain line, and from one to the next
COLOURS = {"PASS": 32, "FAIL": 31, "INCOMPLETE": 33, "NOTHING CHECKED": 33, "NOTHING READ": 33}
_CLEAR = "\r\033[K"


@dataclass
class _Work:
    what: str
    look: Callable[[], tuple[float, float, str]]
    unit: str = ""
    text: str = ""
    first: tuple[float, float] | None = None  # how much was done, and when, as it was first looked at

    def line(self, begun: float) -> str:
        now = time.monotonic()
        try:
            done, total, text = self.look()
        except OSError:
            return f"{self.what}: {now - begun:.0f} s"
        had, since = self.first = self.first or (done, now)  # what a resumed run had is not its speed
        share = (done - had) / (total - had) if total > had else 0
        left = f"about {(now - since) * (1 / share - 1):.0f} s left" if 0.1 <= share < 1 else ""  # sooner none knows
        far = f"{done:.4g} of {total:.4g} {self.unit}".rstrip() if total else ""
        parts = (far, text or self.text, f"{now - begun:.0f} s", left)
        return f"{self.what}: {', '.join(filter(None, parts))}"


_works: list[_Work] = []  # the last is the innermost one, which is shown


@contextlib.contextmanager
def working(
    what: str, look: Callable[[], tuple[float, float, str]] = lambda: (0, 0, ""), unit: str = ""
) -> Iterator[None]:
    """Shows on stderr, from a thread, that `what` is being done, until the block ends. `look` says how much of how much
    of `unit` is done and what is in hand; without it, or where its text is empty, the latest `note` is shown.
    """
    _works.append(_Work(what, look, unit))
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(stop,), daemon=True) if len(_works) == 1 else None
    try:
        if thread:
            thread.start()
        yield
    finally:
        stop.set()
        if thread:
            thread.join()
        _works.pop()


def note(text: str) -> None:
    if _works:
        _works[-1].text = text


def say(text: str, error: bool = False) -> None:
    """Prints to stdout, or stderr; the line of what is `working` makes room."""
    if sys.stderr.isatty():
        _put("")
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


def _put(text: str) -> None:
    """A line of its own; on a terminal in place of the one before."""
    if sys.stderr.isatty():
        text = f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}"
    print(text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def _watch(stop: threading.Event) -> None:
    begun, shown, every = time.monotonic(), None, FIRST if sys.stderr.isatty() else EVERY
    due = begun + FIRST
    while not stop.wait(min(0.1, EVERY)):
        work, now = _works[-1], time.monotonic()
        if now >= due or (shown and work is not shown):
            _put(work.line(begun))
            shown, due = work, now + every
    if shown and sys.stderr.isatty():
        _put("")


def coloured(text: str) -> str:
    """`text` with PASS and its like in colour, where stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    words = "|".join(COLOURS)
    return re.sub(rf"\b({words})\b", lambda found: f"\033[{COLOURS[found[0]]}m{found[0]}\033[0m", text)
