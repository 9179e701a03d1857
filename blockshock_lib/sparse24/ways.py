"""The ways to multiply with cuSPARSELt's packed form: the library with a setting, the small-batch kernel with a config.

In JSON a way is {"product": "cslt" or "small"} and its numbers by name, in the file of choices as between processes.
`tuned.multiply` runs either.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Setting

Way = Setting | Config
PRODUCTS: dict[str, type[Way]] = {"cslt": Setting, "small": Config}


def product(way: Way) -> str:
    """ "cslt" or "small"."""
    return "small" if isinstance(way, Config) else "cslt"


def as_json(way: Way) -> dict[str, str | int]:
    return {"product": product(way), **way._asdict()}


def from_json(plain: Mapping[str, object]) -> Way:
    """The inverse of `as_json`. ValueError where it is not that of a way."""
    kind = PRODUCTS.get(plain.get("product"))
    numbers = {name: value for name, value in plain.items() if name != "product"}
    if kind is None or set(numbers) != set(kind._fields) or any(type(number) is not int for number in numbers.values()):
        raise ValueError(f"not a way to multiply: {plain}")
    way = kind(**numbers)
    if (way.alg_id < 0 or way.split_k == 0) if kind is Setting else min(way) < 1:
        raise ValueError(f"a way out of range: {plain}")
    return way


def words(way: Way) -> str:
    """For people, e.g. "cslt alg_id 17 split_k 2 split_k_mode 1"."""
    return " ".join((product(way), *(f"{name} {value}" for name, value in way._asdict().items())))
