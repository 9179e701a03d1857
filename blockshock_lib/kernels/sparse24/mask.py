"""Masks by name: how a weight is split into two 2:4 terms. Imports no torch; `masks` makes the tensors."""

from dataclasses import dataclass

from blockshock_lib.errors import UnsupportedError, allowed

PATTERNS = {
    "uniform": ("1100", "0011", "1010", "0101", "1001", "0110"),
    "random": ("",),
    "transposable": ("checkerboard", "random"),
    "magnitude": ("",),
}
"""Mask family -> its patterns. A uniform pattern has two ones: the columns that term 0 keeps of every four."""
TRANSPOSABLE = {"transposable"}
"""Families whose masks are 2:4 along the outputs too."""


@dataclass(frozen=True)
class Mask:
    """How a weight is split in two terms. Term 0 keeps what the pattern marks, term 1 the rest."""

    name: str
    family: str
    pattern: str = ""

    @classmethod
    def named(cls, name: str) -> "Mask":
        """A shipped mask. UnsupportedError where there is none of that name."""
        if name not in MASKS:
            raise UnsupportedError(f"no mask is called {name!r}; {allowed(name, MASKS)}")
        return MASKS[name]

    @property
    def periodic(self) -> bool:
        """One 4x4 tile repeats: the product is dense in a permuted basis."""
        return self.family == "uniform" or (self.family, self.pattern) == ("transposable", "checkerboard")

    @property
    def transposable(self) -> bool:
        return self.family in TRANSPOSABLE


MASKS = {
    mask.name: mask
    for mask in (
        Mask("uniform_1100", "uniform", "1100"),
        Mask("uniform_1010", "uniform", "1010"),
        Mask("uniform_1001", "uniform", "1001"),
        Mask("random", "random"),  # any two of each four, drawn for every group
        Mask("checkerboard", "transposable", "checkerboard"),  # one 4x4 tile of 2x2 blocks repeated
        Mask("transposable_random", "transposable", "random"),  # one of the 90 tiles that are 2:4 both ways, drawn
        Mask("magnitude", "magnitude"),  # the two larger weights of each four
    )
}
