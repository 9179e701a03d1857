"""Pydantic's errors as sentences: the file, the dotted key, what is allowed there, and the nearest match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from blockshock_lib.params.strict_yaml import allowed

# Pydantic's error type -> what would have been right there; {..} is filled from the error's context.
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": 'text; put it in quotes, as in "1100"',
    "string_pattern_mismatch": "letters, digits and _ . + -, at most 64, no blank and no path",
    "tuple_type": "a list, as in [1, 2]",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def explain(error: ValidationError, model: type[BaseModel], where: Callable[[tuple], tuple[str, str]]) -> str:
    """One line an error, unknown keys first: a misspelt key is also a missing one, and the spelling is what mends it.

    Args:
        where: location -> (file, dotted key).
    """
    found = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    lines = []
    for one in found:
        loc = one["loc"]
        if any(other["loc"][: len(loc)] == loc and other["loc"] != loc for other in found):
            continue  # a list is "too short" without the entry that is wrong
        if one["type"] == "combination":
            loc = (*loc, *one["ctx"]["key"].split("."))
        source, key = where(loc)
        lines.append(f"{source}: {key}: {_sentence(one, model)}")
    return "\n".join(lines)


def _sentence(error: dict, model: type[BaseModel]) -> str:
    kind, loc, given = error["type"], error["loc"], _short(error["input"])
    context = error.get("ctx", {})
    if kind == "combination":
        return context["sentence"]
    if kind == "missing":
        return (
            "is missing: no file sets it"
            if isinstance(loc[-1], str)
            else "a value is missing; allowed: a pair [in, out]"
        )
    if kind == "extra_forbidden":
        known = list(_model(_annotation(model, loc[:-1])).model_fields)
        phrase = allowed(loc[-1], known)
        elsewhere = [key for key in _keys(model) if key.split(".")[-1] == loc[-1]]
        return f"unknown key; {phrase}" + (
            f"; did you mean {elsewhere[0]!r}?" if elsewhere and "mean" not in phrase else ""
        )
    if kind == "literal_error":
        return f"{given} is not allowed; {allowed(error['input'], _literals(_annotation(model, loc)))}"
    if kind == "multiple_of":
        step = context["multiple_of"]
        near = max(step, round(error["input"] / step) * step)
        return f"{given} is not a multiple of {step}; allowed: multiples of {step}; nearest: {near}"
    if kind == "too_short":
        return f"{given} is too short; allowed: at least {context['min_length']}"
    if kind == "too_long":
        return f"{given} is too long; allowed: {context['max_length']} values"
    if kind in ("model_type", "model_attributes_type"):
        return f"{given}; allowed: a mapping with the keys {', '.join(_model(_annotation(model, loc)).model_fields)}"
    if kind in EXPECTED:
        return f"{given}; allowed: {EXPECTED[kind].format(**context)}"
    return f"{given}: {error['msg']}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _annotation(model: type[BaseModel], loc: tuple) -> object:
    """The type at a location: a field's where the part is a key, an element's where it is an index."""
    at: object = model
    for part in loc:
        at = _model(at).model_fields[part].annotation if isinstance(part, str) else get_args(at)[0]
    return at


def _model(annotation: object) -> type[BaseModel]:
    return next(a for a in _leaves(annotation) if isinstance(a, type) and issubclass(a, BaseModel))


def _literals(annotation: object) -> tuple:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _leaves(annotation: object) -> Iterator[object]:
    yield annotation
    if get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from _leaves(inner)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model, lists left out."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
