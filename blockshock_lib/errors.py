"""Typed failures. Each carries one clear sentence that says what is wrong and what would mend it."""

import difflib
from collections.abc import Iterable

# What others call it.
ALIASES = {"gpu": "cuda", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}


def allowed(word: object, known: Iterable[object]) -> str:
    """The allowed values as a phrase, and the nearest of them where one is near."""
    names = [str(k) or repr(k) for k in known]
    alias = ALIASES.get(str(word).lower())
    near = [alias] if alias in names else difflib.get_close_matches(str(word), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near and near[0] != word else ""
    return f"allowed: {', '.join(names) or 'none'}{hint}"


def first_line(text: object) -> str:
    """The first line of an error's (or any) text that is not blank: what fits in a row's reason."""
    nothing = type(text).__name__ if isinstance(text, BaseException) else "no message"
    return next((line.strip() for line in str(text).splitlines() if line.strip()), nothing)


class BlockShockError(Exception):
    """Base of every failure that this library raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in the place of a traceback: the sentence. `%tb` still gives the frames."""
        return [f"{type(self).__name__}: {self}"]


class ParamsError(BlockShockError):
    """A parameter is unknown, misspelt, mistyped or impossible. Raised before any process or kernel starts."""


class UnsupportedError(BlockShockError):
    """This machine, dtype or shape cannot run what was asked; the message is the reason shown in its row."""


class RecordError(BlockShockError):
    """A record is damaged or breaks the schema, for example a time of zero."""


class LaunchError(BlockShockError):
    """A group of worker processes could not be started, or was used after it had ended."""


class RankError(LaunchError):
    """`rank` failed first. `kind`: its exception's class, or a signal that ended it: `traceback` is then of its log."""

    def __init__(self, rank: int, kind: str, message: str, traceback: str):
        super().__init__(f"rank {rank} failed with {kind}: {message}\n--- rank {rank} ---\n{traceback}")
        self.rank, self.kind, self.message, self.traceback = rank, kind, message, traceback


class DeadlineError(LaunchError):
    """The ranks did not finish in time. `stacks`: rank -> the Python stacks of all its threads then."""

    def __init__(self, seconds: float, stacks: dict[int, str]):
        told = "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(stacks.items()))
        super().__init__(f"no answer from all ranks within {seconds:g} s{told}")
        self.stacks = stacks


class Interrupted(BlockShockError):
    """A run was stopped on purpose. What a listener raises to stop one; the manifest then says `interrupted`."""


class CompareError(BlockShockError):
    """Two runs cannot be compared as they are: other hardware, dtype or unclean code, or nothing in common."""


class ShareError(BlockShockError):
    """A run cannot be packed as it is, or a zip is not that of a run: nothing of it was kept."""


class CheckpointError(BlockShockError):
    """A checkpoint is damaged, holds more than tensors, or is not that of this model; nothing was changed."""


class DataError(BlockShockError):
    """Text or tokens to train on are missing, damaged, changed, or not fit for what was asked."""
