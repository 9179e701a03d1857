"""Records frame in; table, figure, verdict or page out. Reads records only: a run can be redrawn without a GPU."""

import pkgutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def late(place: str, *given: Any, once: bool = False, **options: Any) -> Callable[..., Any]:
    """The function at "module:name" of the library, called with a frame, what is given and what is asked.

    It is imported then, so that a study's tables and figures can be named before pandas is loaded. `once`: what it said
    of the latest frame is kept, for answer, tables and the verdict's line ask a rule the same.
    """
    kept: list[Any] = []

    def called(frame: Any, *more: Any, **how: Any) -> Any:
        alone = once and not (more or how)
        if alone and kept and kept[0] is frame:
            return kept[1]
        said = pkgutil.resolve_name(called.place)(frame, *given, *more, **options | how)
        kept[:] = (frame, said) if alone else kept
        return said

    called.place = f"blockshock_lib.{place}"
    return called


def shared_tables(axes: Any, hypotheses: Any) -> dict[str, Callable[..., Any]]:
    """The tables of every study, by name."""
    given = {"correctness": "correctness_table", "reasons": "reasons", "errors": "error_table"}
    given |= {"energy": "energy_table", "kernels": "top_kernels"}
    found = {name: late(f"report.tables:{table}", axes) for name, table in given.items()}
    found |= {name: late(f"report.tables:{name}_table") for name in ("ceilings", "machine")}
    told = {"hypotheses": "words", "numbers": "numbers"}
    return found | {name: late(f"report.verdicts:{words}", hypotheses) for name, words in told.items()}


def columns(rows: Iterable[Sequence[str]], width: int = 0) -> str:
    """Rows of texts in columns as wide as they need; the last one is folded to `width` characters a line, if given."""
    rows = list(rows)
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = []
    for *cells, last in rows:
        head = "".join(f"{text:<{most}}  " for text, most in zip(cells, wide, strict=True))
        folded = textwrap.wrap(last, max(24, width - len(head)), break_long_words=False) if width else []
        first, *more = folded or [last]
        lines += [head + first, *(" " * len(head) + text for text in more)]
    return "\n".join(line.rstrip() for line in lines)
