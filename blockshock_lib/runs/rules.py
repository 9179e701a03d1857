"""Which definitions decide the verdicts of a run: the rules of its phase, and what these call of their study and of the
report. What is only said, in a docstring, a comment or a sentence beside the verdict, decides nothing.
"""

import ast
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pandas as pd

from blockshock_lib import studies
from blockshock_lib.engine.study import Study
from blockshock_lib.files import canonical, sha256
from blockshock_lib.report import verdicts
from blockshock_lib.runs import code

# Of the report: valid samples, intervals, the runs of a cell, verdicts.
_DECIDE = tuple(f"blockshock_lib.report.{name}" for name in ("frames", "interval", "reruns", "verdicts"))


def of(study: Study, phase: str, root: Path = code.HERE) -> dict[str, str]:
    """digest: of the definitions, as they stand under `root`. file: those that hold them; commit: in which they stand,
    "" outside git or where they differ. A rule counts for data after that commit.
    """
    walk = _Walk((*_DECIDE, studies.module_of(study.name)), root)
    for func in study.hypotheses.get(phase, ()):
        func = resolve_name(func.place) if hasattr(func, "place") else func
        walk.enter(func.__module__, func.__name__)
    names = sorted(Path(os.path.relpath(path, root)).as_posix() for path in walk.paths)
    clean = names and not code.git(root, "status", "--porcelain", "--", *names)
    commit = code.git(root, "log", "-1", "--format=%H", "--", *names) if clean else ""
    return {"file": ", ".join(names), "digest": sha256(canonical(sorted(walk.found.values())))[:12], "commit": commit}


def changed(facts: Mapping[str, Any], study: Study, frame: pd.DataFrame) -> str:
    """Whether the rules are not those that stood before the data of the run whose manifest holds `facts`, and which
    verdicts of `frame` those gave; "" where they are the same, or were not kept.
    """
    then = (facts.get("rules") or {}).get("digest")
    if not then or then == of(study, facts["phase"])["digest"]:
        return ""
    was, now = facts.get("verdicts"), verdicts.by_name(frame, study.hypotheses)
    moved = ", ".join(f"{name} {verdict}" for name, verdict in (was or {}).items() if now.get(name) != verdict)
    more = "" if was is None else f", which said {moved}" if moved else ", with the same verdicts"
    return f"judged by other rules than stood before the data{more}"


class _Walk:
    """`found`: "module.name" -> source of each definition in `modules`, or below them, that those entered name."""

    def __init__(self, modules: tuple[str, ...], root: Path):
        self.modules, self.root = modules, root
        self.found: dict[str, str] = {}
        self.paths: set[Path] = set()

    def enter(self, module: str, name: str) -> None:
        path, text, bound, imported = self._file(module)
        if name not in bound or f"{module}.{name}" in self.found:
            return
        self.found[f"{module}.{name}"] = code.plain(text, bound[name])
        self.paths.add(path)
        every = [*ast.walk(bound[name])]
        own = {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        own |= {one.arg for one in every if isinstance(one, ast.arg)}
        for one in every:
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in imported:
                self.enter(".".join(imported[one.value.id]), one.attr)  # of a module
            elif isinstance(one, ast.Name) and one.id not in own:
                self.enter(module, one.id)
                there, known = imported.get(one.id, ("", ""))
                # Tables of a study, its methods say, grow: a constant counts in its own file alone.
                if isinstance(self._file(there)[2].get(known), ast.FunctionDef | ast.ClassDef):
                    self.enter(there, known)

    @cache  # noqa: B019 - a walk is short
    def _file(self, module: str) -> tuple[Path, str, dict[str, ast.stmt], dict[str, tuple[str, str]]]:
        """Path and text; name -> the statement at its top that binds it; imported name -> (module, its name there)."""
        ours = any(module == one or module.startswith(f"{one}.") for one in self.modules)
        places = [self.root / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")] if ours else []
        if ours and not module.startswith("blockshock_lib."):  # a study that is not ours
            places += [Path(getattr(sys.modules.get(module), "__file__", None) or "")]
        path = next(filter(Path.is_file, places), Path())
        text = path.read_text("utf-8") if path.name else ""
        bound, imported = {}, {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom):
                imported |= {one.asname or one.name: (node.module or "", one.name) for one in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
                bound |= {one.id: node for one in names if isinstance(one.ctx, ast.Store)}
        return path, text, bound, imported
