"""What a command says while it works: a bar on a terminal, elsewhere a plain line every few seconds; and colours."""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

FIRST, EVERY = 0.3, 8.0  # seconds to the first plain line, and from one to the next
COLOURS = {"PASS": 32, "FAIL": 31, "INCOMPLETE": 33, "NOTHING CHECKED": 33, "NOTHING READ": 33}


@dataclass
class _Work:
    what: str
    look: Callable[[], tuple[int, int, str]] | None
    text: str = ""

    def state(self) -> tuple[int, int, str]:
        with contextlib.suppress(OSError):
            done, total, text = self.look() if self.look else (0, 0, "")
            return done, total, text or self.text
        return 0, 0, self.text


_works: list[_Work] = []  # the last is the innermost one, which is shown


@contextlib.contextmanager
def working(what: str, look: Callable[[], tuple[int, int, str]] | None = None) -> Iterator[None]:
    """Shows on stderr, from a thread, that `what` is being done, until the block ends. `look` says how much of how much
    is done and what is in hand; without it, or where its text is empty, the latest `note` is shown.
    """
    _works.append(_Work(what, look))
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
    """What is in hand now, where something is `working`."""
    if _works:
        _works[-1].text = text


def say(text: str) -> None:
    """Prints to stdout; a bar makes room."""
    tqdm.write(text)
    sys.stdout.flush()


def _watch(stop: threading.Event) -> None:
    begun, shown, bar = time.monotonic(), None, None
    due = begun + FIRST
    while not stop.wait(min(0.1, EVERY)):
        work, now = _works[-1], time.monotonic()
        (done, total, text), new = work.state(), work is not shown
        if sys.stderr.isatty():
            if new and bar is not None:
                bar.close()
            if new or bar.total != (total or None):
                form = None if total else "{desc} {elapsed}{postfix}"
                bar = tqdm(total=total or None, desc=work.what, leave=False, bar_format=form)
            bar.n = done
            bar.set_postfix_str(text)
        elif now >= due or (new and shown):
            parts = [f"{done} of {total}" if total else "", text, f"{now - begun:.0f} s"]
            print(f"{work.what}: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)
            due = now + EVERY
        else:
            continue
        shown = work
    if bar is not None:
        bar.close()


def coloured(text: str) -> str:
    """`text` with PASS and its like in colour, where stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    words = "|".join(COLOURS)
    return re.sub(rf"\b({words})\b", lambda found: f"\033[{COLOURS[found[0]]}m{found[0]}\033[0m", text)


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts in columns as wide as they need."""
    rows = list(rows)
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{text:<{width}}" for text, width in zip(row, wide, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
