"""`python -m blockshock_lib.notebook.results` writes docs/results/<study>.md and README's table from the records."""

import re
from pathlib import Path

from blockshock_lib import files, studies
from blockshock_lib.files import ROOT
from blockshock_lib.notebook.findings import Findings

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def written() -> dict[Path, str]:
    """File -> what it should hold, of the shipped records: every study's page, and README where it has the markers."""
    pages, rows = {}, []
    for name in studies.names():
        study = studies.load(name)
        if study.results:
            found = Findings(None, "reference", Path(), name)
            sentence, page = (make(found.main) for make in study.results)
            source = f"Written by `make findings` from the records of {found.setting}."
            text = f"# Results of the study {name}\n\n**{study.question}**\n\n{source}\n\n{page}\n"
            pages[ROOT / "docs" / "results" / f"{name}.md"] = text
            rows.append(f"| [{name}](docs/results/{name}.md) | {study.question} | {sentence} |")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if BEGIN in text:
        table = "\n".join(["| study | question | answer |", "| --- | --- | --- |", *rows])
        pages[readme] = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", text, flags=re.DOTALL)
    return pages


def main() -> None:
    for path, text in written().items():
        files.write_atomic(path, text)
        print(files.shown(path))


if __name__ == "__main__":
    main()
