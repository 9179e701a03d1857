"""The backends, a row each. A module says what it cannot do (`refuse`) and does the rest (`attend`); where it has a
`forward` and a `backward` of its own, those take and give the logsumexp, and parts of the keys can be merged.
"""

from functools import partial
from types import ModuleType
from typing import Any

from blockshock_lib.errors import UnsupportedError, allowed
from blockshock_lib.kernels.attention import cudnn, fa4, flex, gluon, reference, sdpa, triton, tune
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.tuning.child import Search

_ROWS = (reference, triton, gluon, flex, fa4, cudnn, sdpa)
BACKENDS: dict[str, ModuleType] = {row.__name__.rpartition(".")[2]: row for row in _ROWS}
WORD = 300.0  # seconds between two compilations, in which the search says nothing
SEARCH = Search(f"{__name__}:SEARCH", tune.KINDS, partial(tune.run, BACKENDS), tune.SECONDS, silence=WORD)


def chosen(name: str, call: Call) -> ModuleType:
    """The backend of that name; our kernels as they were cut for the nearest call that was tuned. ValueError where
    there is none; UnsupportedError, with its reason, where it cannot.
    """
    if name == "auto":
        return tune.auto(BACKENDS, call)
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; {allowed(name, ['auto', *BACKENDS])}")
    if why := BACKENDS[name].refuse(call):
        raise UnsupportedError(f"backend {name!r} cannot do this attention: {why}")
    return tune.with_cuts(BACKENDS, name, tune.nearest(call))


def name_of(row: Any) -> str:
    """That of a backend that was chosen, as its kernels are cut or not."""
    return next(name for name, one in BACKENDS.items() if one.refuse is row.refuse)


def explicit(name: str, call: Call) -> ModuleType:
    """`chosen` for what merges parts of the keys, as a ring does, whose calls have no pattern: UnsupportedError where
    the backend has no backward of its own.
    """
    if name == "auto":
        return tune.auto({each: row for each, row in BACKENDS.items() if hasattr(row, "backward")}, call, merge=True)
    if name in BACKENDS and not hasattr(BACKENDS[name], "backward"):
        raise UnsupportedError(f"backend {name!r} has no backward that takes the logsumexp over all keys")
    return chosen(name, call)


def tuned(call: Call, seconds: float = tune.SECONDS) -> dict[str, float]:
    """As `tune.tuned`, among all backends; `seconds` for each kind of cuts."""
    SEARCH.seconds = seconds
    return tune.tuned(SEARCH, call)
