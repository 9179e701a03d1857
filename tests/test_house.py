"""The house holds: rooms use only rooms below them, none knows a study, and no file is long. See docs/engine.md."""

import ast
import graphlib
import itertools
import re

import pytest

from blockshock_lib.files import ROOT

LIBRARY = ROOT / "blockshock_lib"
# A room uses rooms of the floors below its own, and what is listed beside its name.
FLOORS = (
    {"errors": (), "files": ("errors",)},
    {"params": (), "ranks": (), "kernels": ()},
    {"comm": (), "report": ()},
    {"layers": (), "engine": ()},
    {"studies": ()},
    {"runs": ()},
    {"notebook": ()},
    {"__main__": ()},
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
GENERAL = ("params", "ranks", "comm", "report", "engine", "runs", "notebook")
WORDS = r"in_features|out_features|block_shock|row_parallel|\bdW\b|\bdX\b|\bphase[0-3]\b|[\"']mask[\"']|checkerboard"


def named(source, package):
    """What the imports in `source`, a file of `package`, name, wherever they stand: of `from a import b` (a, a.b)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((base, f"{base}.{alias.name}") for alias in node.names)


def imported(source, package):
    return itertools.chain.from_iterable(named(source, package))


def package_of(path):
    return ".".join(path.relative_to(ROOT).parent.parts)


def faults(room, source, package):
    """The rooms that a file of `room` uses and may not."""
    parts = [module.split(".") for module in imported(source, package) if module.startswith("blockshock_lib.")]
    used = {part[1] for part in parts if part[1] in FLOOR} - {room, *FLOORS[FLOOR[room]][room]}
    return {other for other in used if FLOOR[other] >= FLOOR[room]}


def files(*rooms):
    for room in rooms:
        place = LIBRARY / room
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def test_every_room_is_on_a_floor_and_there_are_few():
    rooms = {path.stem for path in LIBRARY.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert rooms - {"__init__"} == FLOOR.keys() and len(rooms) <= 14


@pytest.mark.parametrize("room", FLOOR)
def test_a_room_uses_only_rooms_below_it(room):
    for path in files(room):
        assert not faults(room, path.read_text(), package_of(path)), path.relative_to(ROOT)


@pytest.mark.parametrize(
    "source",
    [
        "import blockshock_lib.runs.run as run",
        "from blockshock_lib import runs",
        "from blockshock_lib.runs.run import Run",
        "from ..runs import run",
        "def late():\n    from blockshock_lib import runs",
        "if TYPE_CHECKING:\n    from blockshock_lib.runs.run import Run",
    ],
)
def test_an_arrow_upwards_is_found_however_it_is_written(source):
    assert faults("engine", source, "blockshock_lib.engine") == {"runs"}
    assert not faults("notebook", source, "blockshock_lib.notebook")


def circle(edges):
    """A circle of modules in `edges`, module -> modules; () where there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return tuple(error.args[1])
    return ()


def test_no_modules_import_each_other_in_a_circle():
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in LIBRARY.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    edges = {}
    for name, path in paths.items():
        known = ([one for one in names if one in paths] for names in named(path.read_text(), package_of(path)))
        edges[name] = {names[-1] for names in known if names} - {name}  # a, where a.b is no module
    assert len(edges) > 50 and not circle(edges), " > ".join(circle(edges))


def test_a_circle_is_found_through_a_function_or_a_type():
    late, typed = "def f():\n    from a import b", "if TYPE_CHECKING:\n    from a.c import C"
    assert set(imported(late, "a")) >= {"a.b"} and set(imported(typed, "a")) >= {"a.c"}
    assert set(circle({"a.b": {"a.c"}, "a.c": {"a.d"}, "a.d": {"a.b"}})) == {"a.b", "a.c", "a.d"}
    assert not circle({"a.b": {"a.c", "a.d"}, "a.c": {"a.d"}, "a.d": set()})


@pytest.mark.parametrize("room", GENERAL)
def test_a_general_room_holds_no_word_of_a_study(room):
    pages = (path for path in (LIBRARY / room).rglob("*") if path.suffix in {".html", ".js", ".css", ".cu"})
    for path in (*files(room), *pages):
        found = re.search(WORDS, path.read_text())
        assert not found, f"{path.relative_to(ROOT)} says {found[0]}"


def test_no_file_of_the_library_is_longer_than_300_lines():
    long = {path.name: count for path in LIBRARY.rglob("*.py") if (count := path.read_text().count("\n")) > 300}
    assert not long


# Words in a path of the library that say whose a file is; what has none is of the general rooms and the linear study.
WHOSE = {
    "attention": ("attention",),
    "gpt": ("gpt",),
    "gallery": ("gallery", "sparsify", "patterns", "pattern_linear", "pruning", "generate"),
}
# Lines of Python, as many as there are today, to a round figure. The aims: 18,000 of the general rooms and the linear
# study, 3,500 of attention and of the gallery, 3,000 of gpt.
MOST_LINES = {"": 19_539, "attention": 6_839, "gpt": 3_672, "gallery": 5_307}


def whose(path):
    return next((study for study, words in WHOSE.items() if any(word in path for word in words)), "")


def lines_of(study, place=LIBRARY):
    of = (path for path in place.rglob("*.py") if whose(path.relative_to(place).as_posix()) == study)
    return sum(path.read_text().count("\n") for path in of)


@pytest.mark.parametrize("study", MOST_LINES)
def test_the_house_and_its_studies_do_not_grow(study):
    """A study is about 3,500 lines with its layers and kernels; general code is shared by all of them."""
    lines = lines_of(study)
    assert 1000 < lines <= MOST_LINES[study], f"{study or 'the general rooms with the linear study'}: {lines} lines"


def test_the_tests_of_the_general_rooms_and_the_linear_study_do_not_grow():
    assert 1000 < lines_of("", ROOT / "tests") <= 18_177
