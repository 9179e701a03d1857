"""The visible table of studies: a study is a folder beside this file and a row here."""

import os
import pkgutil

from blockshock_lib.engine.study import Study
from blockshock_lib.errors import ParamsError, allowed

STUDIES = {
    "linear": "blockshock_lib.studies.linear:STUDY",
    "attention": "blockshock_lib.studies.attention:STUDY",
    "gpt": "blockshock_lib.studies.gpt:STUDY",
    "gallery": "blockshock_lib.studies.gallery:STUDY",
}
"""Name -> "module:NAME". The environment variable BLOCKSHOCK_STUDIES adds more: name=module:NAME, by commas."""


def names() -> tuple[str, ...]:
    return tuple(_table())


def load(name: str) -> Study:
    """The study of that name. ParamsError where there is none."""
    if name not in (table := _table()):
        raise ParamsError(f"{name!r} is no study; {allowed(name, table)}")
    return pkgutil.resolve_name(table[name])


def module_of(name: str) -> str:
    """It need not have been imported."""
    return _table()[name].partition(":")[0]


def of_phase(phase: str) -> Study:
    """The study that has this phase: "study/phase", or a phase's name alone. ParamsError where none has it."""
    study, _, name = phase.rpartition("/")
    every = [load(one) for one in ([study] if study else names())]
    if found := [one for one in every if name in one.phases]:
        return found[0]
    if phase in names():
        raise ParamsError(f"{phase!r} is a study; its phases: {', '.join(load(phase).phases)}")
    known = allowed(name, (key for one in every for key in one.phases))
    raise ParamsError(f"phase: {phase!r} is no phase of a study; {known}")


def _table() -> dict[str, str]:
    added = [text.partition("=") for text in os.environ.get("BLOCKSHOCK_STUDIES", "").split(",") if text]
    if wrong := [name for name, _, place in added if ":" not in place]:
        raise ParamsError(f"environment: BLOCKSHOCK_STUDIES: {wrong[0]!r}; allowed: name=module:NAME, by commas")
    return STUDIES | {name: place for name, _, place in added}
