"""python -m blockshock_lib run | list | figure"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from blockshock_lib import params, records, workbook
from blockshock_lib.errors import BlockShockError, RecordError
from blockshock_lib.manifest import shown
from blockshock_lib.report import plots


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m blockshock_lib", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)

    run = verbs.add_parser("run", help="run a phase into a dated, executed notebook with its page and records")
    run.add_argument("phase", choices=sorted(workbook.NOTEBOOKS))
    for kind in ("hardware", "workload", "mask", "methods", "sweep"):
        run.add_argument(
            f"--{kind}", metavar="NAME", help=f"a file in params/{params.FOLDERS[kind]}, without its ending"
        )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one parameter, e.g. sweep.n=[4096,8192]; may be repeated",
    )
    run.add_argument(
        "--redraw", default="", metavar="FOLDER", help="measure nothing: redraw the records of an earlier run"
    )
    run.add_argument(
        "--out", type=Path, default=workbook.OUTPUTS, help="where the dated folder goes (default: outputs/)"
    )

    figure = verbs.add_parser("figure", help="draw Block-Shock's speed over B1, as measured in a run, as a PNG")
    figure.add_argument("folder", type=Path)
    figure.add_argument("png", type=Path)

    runs = verbs.add_parser("list", help="list the runs, newest first")
    runs.add_argument("--out", type=Path, default=workbook.OUTPUTS)
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: done and every check passed; 1: the run or a check failed; 2: the request was refused."""
    args = parser().parse_args(argv)
    try:
        if args.verb == "list":
            found = workbook.runs(args.out)
            for run in found.itertuples():
                print(f"{run.started}  {run.phase}  {run.status}  {run.machine}\n    {run.folder}\n    {run.verdict}")
            if found.empty:
                print(f"no runs under {shown(args.out)}")
            return 0
        if args.verb == "figure":
            frame = records.load(args.folder)
            if frame.empty:
                raise RecordError(f"{args.folder} holds no records")
            args.png.write_bytes(plots.png(plots.ratio_heatmap(frame)))
            return 0
        settings = dict(params.parse_override(text) for text in args.set)
        for kind in ("workload", "mask", "methods", "sweep"):
            if getattr(args, kind):
                settings[f"layers.{kind}"] = getattr(args, kind)
        outcome = workbook.execute(
            args.phase, hardware=args.hardware or "auto", settings=settings, redraw=args.redraw, out=args.out
        )
    except (BlockShockError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(outcome.line())
    return 0 if outcome.ok else 1


if __name__ == "__main__":
    sys.exit(main())
