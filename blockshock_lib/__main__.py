"""python -m blockshock_lib run | tune | report | findings | compare | share | list | figure"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from blockshock_lib import joined, params, records, workbook
from blockshock_lib.errors import BlockShockError, ParamsError, RecordError
from blockshock_lib.manifest import shown

DONE, WRONG, REFUSED, STOPPED = 0, 1, 2, 130  # 130: what a shell says of Ctrl-C


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m blockshock_lib", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument(
        "--out", type=Path, default=workbook.OUTPUTS, help="where the dated folders are (default: outputs/)"
    )

    run = verbs.add_parser(
        "run", parents=[out], help="run a phase into a dated, executed notebook with page and records"
    )
    run.set_defaults(do=_run)
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
        "--dry-run", action="store_true", help="list the cases, their bytes and an estimate of time; start nothing"
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        default="",
        metavar="FOLDER",
        help="go on with a run that was stopped (default: the latest of this phase); no finished case is repeated",
    )

    tune = verbs.add_parser(
        "tune", help="find the fastest right 2:4 products and all-reduces of this machine ahead of a run, and keep them"
    )
    tune.set_defaults(do=_tune)
    wanted = tune.add_mutually_exclusive_group()
    wanted.add_argument(
        "--phase",
        choices=sorted(workbook.NOTEBOOKS),
        default="phase1",
        help="all that this phase asks for here (default: phase1)",
    )
    wanted.add_argument("--n", nargs="+", type=int, default=[], metavar="N", help="out_features of single weights")
    tune.add_argument("--k", nargs="+", type=int, default=[], metavar="K", help="in_features (default: those of --n)")
    tune.add_argument("--b", nargs="+", type=int, default=[], metavar="B", help="batches that go with --n")
    tune.add_argument("--dtype", choices=("bf16", "fp16"), help="that goes with --n (default: bf16)")

    report = verbs.add_parser(
        "report", parents=[out], help="draw the records of a run again, a folder or a zip; measures nothing"
    )
    report.set_defaults(do=_report)
    report.add_argument("run", type=Path, metavar="FOLDER_OR_ZIP")

    compare = verbs.add_parser("compare", help="compare run B with run A, case by case; exit status 1 on a regression")
    compare.set_defaults(do=_compare)
    compare.add_argument("a", metavar="A", help="folder of the older run")
    compare.add_argument("b", metavar="B", help="folder of the newer run")
    compare.add_argument(
        "--allow", default="", metavar="WHAT", help="compare all the same: any of hardware,dtype,dirty, by commas"
    )
    compare.add_argument("--figure", type=Path, metavar="PNG", help="keep the figure")

    share = verbs.add_parser("share", parents=[out], help="write index.html of all runs; or pack one run as a zip")
    share.set_defaults(do=_share)
    share.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of the run to pack")

    findings = verbs.add_parser(
        "findings", parents=[out], help="weigh all records and write the answer page; measures nothing"
    )
    findings.set_defaults(do=_findings)
    findings.add_argument(
        "--runs",
        choices=("all", "reference"),
        default="all",
        help="the shipped references alone, or also your own runs",
    )

    runs = verbs.add_parser("list", parents=[out], help="list the runs, newest first")
    runs.set_defaults(do=_list)

    figure = verbs.add_parser("figure", help="draw Block-Shock's speed over B1, in what the run timed, as a PNG")
    figure.set_defaults(do=_figure)
    figure.add_argument("folder", type=Path)
    figure.add_argument("png", type=Path)
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: done and every check passed; 1: the run or a check failed, or a comparison found a regression; 2:
    the request was refused; 130: interrupted.
    """
    args = parser().parse_args(argv)
    try:
        done = args.do(args)
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # whoever read what is printed, `head` for one, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (BlockShockError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED


def _run(args: argparse.Namespace) -> int:
    settings = dict(params.parse_override(text) for text in args.set)
    for kind in ("workload", "mask", "methods", "sweep"):
        if getattr(args, kind):
            settings[f"layers.{kind}"] = getattr(args, kind)
    hardware = args.hardware or "auto"
    if args.dry_run:
        if args.resume:
            raise ParamsError("--dry-run lists the cases of a new run: leave out --resume")
        from blockshock_lib import machine, predict

        chosen = {} if hardware == "auto" else {"hardware": hardware}
        print(predict.dry_run(params.load(args.phase, settings, choose=chosen), machine.probe()))
        return DONE
    asked = dict(hardware=hardware, settings=settings, resume=args.resume, out=args.out)
    if (place := joined.place()) is None:
        return _say(workbook.execute(args.phase, **asked))
    return _say(joined.execute(args.phase, place, **asked), aloud=place.rank == 0)


def _tune(args: argparse.Namespace) -> int:
    from blockshock_lib import tune

    if bool(args.n) != bool(args.b) or (not args.n and (args.k or args.dtype)):
        raise ParamsError(
            "--n and --b go together; --k and --dtype go with them; without any of these a phase is tuned"
        )
    say = functools.partial(print, flush=True)
    if args.n:
        products = tune.of_shapes(args.n, args.k, args.b, args.dtype or "bf16")
        return DONE if tune.tune_products(products, tune.require_gpu(), say) else WRONG
    chosen = params.load(args.phase)
    device = tune.require_gpu(chosen)
    done = tune.tune_products(tune.of_phase(chosen), device, say)
    tune.tune_sums(tune.sums_of_phase(chosen), chosen.hardware.processes, device, say)
    return DONE if done else WRONG


def _report(args: argparse.Namespace) -> int:
    from blockshock_lib import manifest, share

    folder = share.unpack(args.run, args.out / "received" / args.run.stem) if args.run.is_file() else args.run
    return _say(workbook.execute(manifest.read(folder)["phase"], redraw=shown(folder), out=args.out))


def _say(outcome: workbook.Outcome, aloud: bool = True) -> int:
    if aloud:
        print(outcome.line())
    return DONE if outcome.ok else STOPPED if outcome.status == "interrupted" else WRONG


def _compare(args: argparse.Namespace) -> int:
    from blockshock_lib.comparison import compare
    from blockshock_lib.report import plots

    found = compare(args.a, args.b, allow=tuple(filter(None, args.allow.split(","))))
    if args.figure:
        records.write_atomic(args.figure, plots.png(found.figure()))
    print(found.text())
    return DONE if found.ok else WRONG


def _share(args: argparse.Namespace) -> int:
    from blockshock_lib import share

    print(shown(share.pack(args.run) if args.run else share.write_index(args.out)))
    return DONE


def _findings(args: argparse.Namespace) -> int:
    from blockshock_lib import findings

    return _say(findings.execute(args.runs, out=args.out))


def _list(args: argparse.Namespace) -> int:
    found = workbook.runs(args.out)
    for run in found.itertuples():
        print(f"{run.started}  {run.phase}  {run.status}  {run.machine}\n    {run.folder}\n    {run.verdict}")
    if found.empty:
        print(f"no runs under {shown(args.out)}")
    return DONE


def _figure(args: argparse.Namespace) -> int:
    from blockshock_lib.report import plots
    from blockshock_lib.report.pages import index_plots

    frame = records.load(args.folder)
    if frame.empty:
        raise RecordError(f"{args.folder} holds no records")
    drawn = plots.ratio_heatmap(frame, metric=index_plots.whole(frame))
    records.write_atomic(args.png, plots.png(drawn))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
