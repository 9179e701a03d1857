"""The schedules that have a name: one file each, by the name of its function."""

import inspect
import re
from collections.abc import Callable

from blockshock_lib.errors import allowed
from blockshock_lib.layers.gpt.schedule import Schedule, Step
from blockshock_lib.layers.gpt.schedules.delayed import delayed
from blockshock_lib.layers.gpt.schedules.desync import desync
from blockshock_lib.layers.gpt.schedules.grouped import grouped
from blockshock_lib.layers.gpt.schedules.ladder import ladder
from blockshock_lib.layers.gpt.schedules.none import none
from blockshock_lib.layers.gpt.schedules.parallel import parallel
from blockshock_lib.layers.gpt.schedules.selective import selective
from blockshock_lib.layers.gpt.schedules.spd import spd
from blockshock_lib.layers.gpt.schedules.tensor_parallel import tensor_parallel

SCHEDULES: dict[str, Callable[..., tuple[Step, ...]]] = {
    make.__name__: make for make in (tensor_parallel, parallel, spd, desync, grouped, ladder, delayed, selective, none)
}


def named(text: str, layers: int) -> Schedule:
    """The schedule of, for example, "spd", "grouped(2)" or "selective(0, 11)" for so many layers.
    ValueError where there is none of that name, or it takes no such arguments.
    """
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if found is None or found[1] not in SCHEDULES:
        raise ValueError(f"unknown schedule {text!r}; {allowed(found[1] if found else text, SCHEDULES)}")
    make, given = SCHEDULES[found[1]], [word.strip() for word in (found[2] or "").split(",") if word.strip()]
    arguments = [int(word) if re.fullmatch(r"-?\d+", word) else word for word in given]
    takes = inspect.signature(make)
    try:
        takes.bind(layers, *arguments)
    except TypeError:
        wants = ", ".join(map(str, list(takes.parameters.values())[1:]))
        raise ValueError(f"schedule {text!r} takes ({wants}), not ({', '.join(given)})") from None
    return Schedule(f"{found[1]}({', '.join(given)})" if given else found[1], make(layers, *arguments))
