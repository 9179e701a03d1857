"""Which backend is the fastest of those whose values are right on this machine, measured once and kept on disk.

The search draws q, k, v and dout of a call's shapes and holds what each backend makes of its pattern against the
reference in float64 before it is timed; first it cuts the Triton kernels. What is kept serves other patterns too: those
of another length or density take the nearest that was measured. It runs in a process of its own, as a rival may crash.
"""

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from blockshock_lib.errors import BlockShockError
from blockshock_lib.kernels.attention import trial, triton
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.graph import Clock
from blockshock_lib.kernels.needs import version
from blockshock_lib.kernels.tuning import store
from blockshock_lib.kernels.tuning.child import Search
from blockshock_lib.kernels.tuning.search import MAX_RATIO, RMS_RATIO, Error, Trial, leaders, search

SECONDS = 60.0  # for each kind of cuts, after which no further one is started; backends are few, and all are tried


class Backend(NamedTuple):
    name: str


class Wrong(NamedTuple):
    """A backend whose values were wrong; its time means nothing."""

    name: str


class Unable(NamedTuple):
    """A backend whose values are right but for one ability."""

    name: str
    what: str


ABILITIES = {
    "lse": "the logsumexp",
    "dlse": "the gradient of the logsumexp",
    "merge": "the parts of keys that are merged",
    "heads": "heads that see other keys than others",
}
KINDS = {"backend": Backend, "wrong": Wrong, "unable": Unable, "cut": triton.Config}
STORE = store.Store("attention", KINDS)
Rows = Mapping[str, ModuleType]


def auto(rows: Rows, call: Call, merge: bool = False) -> ModuleType:
    """The fastest right one of what was kept, else the first that can; none that was found wrong, in all or in what
    is asked for. `merge`: parts of the keys.
    """
    kept = nearest(call)
    names = [way.name for way in sorted(kept, key=kept.get) if isinstance(way, Backend)]
    names += ["triton", "flex"] if call.q.is_cuda else []
    wrong = {way.name for way in kept if isinstance(way, Wrong)}  # as tuples, ways of two kinds may be equal
    grad = call.lse_grad and torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    wrong |= {"sdpa"} if grad else set()  # its logsumexp has no gradient
    asked = {"lse": call.return_lse, "dlse": grad, "merge": merge, "heads": call.lists.plane.numel() > 1}
    wrong |= {way.name for way in kept if isinstance(way, Unable) and asked[way.what]}
    for name in names:
        if name in rows and name not in wrong and not rows[name].refuse(call):
            return with_cuts(rows, name, kept)
    return rows["reference"]


def with_cuts(rows: Rows, name: str, ways: Iterable) -> Any:
    """The backend; the Triton kernels as these ways cut them."""
    cuts = {way.kernel: way for way in ways if isinstance(way, triton.Config)}
    if name not in ("triton", "gluon") or not cuts:
        return rows[name]
    own = {each: functools.partial(getattr(rows[name], each), cuts=cuts) for each in ("attend", "forward", "backward")}
    return SimpleNamespace(refuse=rows[name].refuse, cuts=cuts, **own)


def tuned(finder: Search, call: Call) -> dict[str, float]:
    """Searches and keeps: each right backend -> its milliseconds, the fastest first. Warns of what is wrong or crashes.

    BlockShockError where the search fails or nothing is right.
    """
    problem = problem_of(call)
    found = finder.find(problem | {"call": trial.packed(call)}, call.q.device)
    if found.crashes:
        warnings.warn(f"tuning attention left out what crashed: {'; '.join(found.crashes)}", stacklevel=3)
    backends = [each for each in found.trials if isinstance(each.way, Backend)]
    wrong = {each.way.name: each.error for each in backends if each.wrong}
    for name, error in wrong.items():
        warnings.warn(f"backend {name!r} gives wrong values and is never chosen: {_told(error)}", stacklevel=3)
    right = {each.way: each.ms for each in leaders(backends)}
    unable = [each for each in found.trials if isinstance(each.way, Unable) and not each.right]
    for (name, what), error in ((each.way, each.error) for each in unable if each.wrong):
        told = f"{ABILITIES[what]}, and is not chosen where that is asked for: {_told(error)}"
        warnings.warn(f"backend {name!r} gives wrong values of {told}", stacklevel=3)
    if right or wrong:
        kept = {best.way: best.ms for best in _cuts(found.trials)} | {Wrong(name): 1.0 for name in wrong}
        kept |= {each.way: 1.0 for each in unable}
        STORE.keep(problem, versions(), right | kept)
        _kept.cache_clear()
    if found.failed or not right:
        raise BlockShockError(f"tuning attention: {found.failed or 'no backend that can do it gave right values'}")
    return {way.name: ms for way, ms in right.items()}


def _told(error: Error) -> str:
    row, whole = error.max_ratio / MAX_RATIO, error.rms_ratio / RMS_RATIO
    return f"the error is {row:.3g} times what is allowed of a row, {whole:.3g} times in all"


def _cuts(trials: Iterable[Trial]) -> list[Trial]:
    """The fastest right one of each kernel."""
    mine = leaders(each for each in trials if isinstance(each.way, triton.Config))
    return list({each.way.kernel: each for each in reversed(mine)}.values())


def problem_of(call: Call) -> dict:
    """What a choice is kept under. Lengths and the share of visited blocks are powers of two, the nearest."""
    (_, heads, q_len, dim), lists = call.q.shape, call.lists
    power = lambda x: round(math.log2(max(x, 2.0**-20)))  # noqa: E731
    return {
        **{"gpu": gpu(call.q.device), "dtype": str(call.q.dtype).removeprefix("torch."), "head_dim": dim},
        **{"group": heads // call.k.shape[1], "block": lists.block, "partial": bool(len(lists.rows.partial))},
        "grad": torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)),
        **{"heads": power(call.q.shape[0] * heads), "q_len": power(q_len), "k_len": power(lists.k_len)},
        "density": power(lists.block_density),
    }


def nearest(call: Call) -> dict:
    """Ways -> milliseconds, of the kept problem that differs least."""
    return _kept(tuple(problem_of(call).items())) if gpu(call.q.device) else {}


def is_kept(call: Call) -> bool:
    """Whether this very problem was tuned, as the file says now."""
    forget()
    return bool(STORE.find(problem_of(call), versions()))


@functools.cache  # further calls ask no file
def _kept(items: tuple) -> dict:
    problem, sizes = dict(items), ("heads", "q_len", "k_len", "density")
    same = STORE.matching({key: value for key, value in items if key not in sizes}, versions())
    far = lambda entry: sum(abs(entry[0][key] - problem[key]) for key in sizes)  # noqa: E731
    return min(same, key=far)[1] if same else {}


def forget() -> None:
    """What was read of the file: another process may have kept more."""
    _kept.cache_clear()


def gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@functools.cache
def versions() -> dict[str, str]:
    names = ("triton", "flash-attn-4", "nvidia-cudnn-frontend")
    sources = sorted(each for of in ("triton", "gluon") for each in Path(__file__).parent.glob(f"{of}*.py"))
    return store.versions(*sources, **{name: version(name) for name in names})


def run(
    rows: Rows, problem: dict, device: Any, *, clock: Any = None, known: Iterable[Trial] = (), **options: Any
) -> list[Trial]:
    """Cuts of the Triton kernels, then the backends with the best of them; options as of `search`."""
    options.pop("without", None)
    device = torch.device(device)
    grad, clock, known = problem["grad"], clock or Clock(device), list(known)
    draws = [trial.drawn(problem["call"], device, grad, seed) for seed in (0, 1)]
    call, turn, cuts = draws[0].call, itertools.cycle(draws), []
    whole = draws[0]._replace(dout=torch.randn_like(draws[0].dout))  # a gradient of zeros takes less power

    def backend(way: Backend | triton.Config) -> Any:
        return with_cuts(rows, way.name, cuts) if isinstance(way, Backend) else with_cuts(rows, "triton", [way])

    varied = functools.lru_cache(2)(functools.partial(trial.drawn, problem["call"], device, grad, 2))

    def able(way: Backend | Unable) -> Error:
        """In the hardest call that it does not refuse. A rival that says that it leaks a NaN is given none."""
        row, what = backend(Backend(way.name)), getattr(way, "what", "")
        if what == "merge" and not hasattr(row, "backward"):
            raise RuntimeError("it has no backward by the logsumexp over all keys")
        for variant in (1, 2) if what == "heads" else (0, 3)[getattr(row, "LEAKS", 0) :]:
            if not (why := row.refuse(trial.asked(draw := varied(variant), what))):
                return trial.error(row, draw, what)
        raise RuntimeError(why)

    def check(way: Backend | Unable | triton.Config) -> Error:
        with trial.tried(device):
            error = Error(0.0, 0.0) if isinstance(way, Unable) else trial.error(backend(way), next(turn))
            return able(way) if error.right and not isinstance(way, triton.Config) else error

    def timed(way: Backend | triton.Config) -> Any:
        call = functools.partial(trial.made, backend(way), whole)
        with trial.tried(device):
            call()  # what it keeps of these lists is made now: a capture cannot hold the host's look at them
        return clock.timed([call])

    try:
        tried = [each for each in known if isinstance(each.way, triton.Config)]
        if not rows["triton"].refuse(call):
            found = triton.candidates(problem["head_dim"], call.lists.block)
            ways = [cut for name in (found if grad else ("forward",)) for cut in found[name]]
            tried = search(ways, check, timed, kind=lambda way: way.kernel, known=tried, **options)
            cuts += [best.way for best in _cuts(tried)]
        ways = [Backend(name) for name in rows if name != "reference" and not rows[name].refuse(call)]
        unable = [each for each in known if isinstance(each.way, Unable)]
        known = [each for each in known if isinstance(each.way, Backend)]
        # A rival that compiles for longer than `seconds` is no slower for that; 0: of a search that ended too often.
        options |= {"seconds": math.inf} if options.get("seconds") else {}
        found = search(ways, check, timed, finalists=len(rows), known=known, **options)
        # Of each right backend what is asked of some calls alone: all is checked, once; its time says nothing.
        ways = [Unable(each.way.name, what) for each in found if each.right for what in ABILITIES]
        untimed, options["seconds"] = (lambda way: contextlib.nullcontext(lambda: 1.0)), math.inf
        return tried + found + search(ways, check, untimed, finalists=0, known=unable, **options)
    finally:
        clock.close()
