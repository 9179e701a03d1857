"""python -m blockshock_lib run | tune | report | findings | compare | share | list"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import sys
import warnings
from pathlib import Path

from blockshock_lib import studies
from blockshock_lib.errors import BlockShockError, ParamsError, UnsupportedError, allowed
from blockshock_lib.files import ROOT, shown
from blockshock_lib.notebook import terminal
from blockshock_lib.report import columns
from blockshock_lib.runs import manifest
from blockshock_lib.runs.manifest import OUTPUTS

# What a verb needs it imports itself: pandas and torch take seconds, and a list needs neither.
DONE, WRONG, REFUSED, STOPPED = 0, 1, 2, 130  # 130: what a shell says of Ctrl-C
LIST = ("started", "study", "phase", "status", "verdict", "machine", "folder")


def parser(asked: str = "") -> argparse.ArgumentParser:
    """`asked`: the verb, if it is known; only `run` and the help need what the studies bring."""
    top = argparse.ArgumentParser(prog="python -m blockshock_lib", description=__doc__, allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", required=True)
    brought = [studies.load(name) for name in studies.names()] if asked in ("", "run") else []
    phases = ", ".join(name for study in brought for name in study.phases)

    def verb(name: str, do, about: str, out: bool = True, **more: str):
        made = verbs.add_parser(name, help=about, allow_abbrev=False, **more)
        made.set_defaults(do=do, usage=made.format_usage)
        if out:
            made.add_argument("--out", type=Path, default=OUTPUTS, help="of the dated folders (default: outputs/)")
        return made.add_argument

    example = "example: python -m blockshock_lib run phase1 --hardware cuda --mask random --set sweep.n=[4096,8192]"
    add = verb("run", _run, "run a phase into a dated, executed notebook with page and records", epilog=example)
    add("phase", help=f"one of {phases}; or study/phase, or a study for all of its phases")
    add("--hardware", default="auto", metavar="NAME", help="the name of a file in params/hardware (default: auto)")
    about = "the name of a file in params/<study>/sweeps (default: <phase>-<hardware>)"
    add("--sweep", metavar="NAME", dest="layers.sweep", help=about)
    for kind in dict.fromkeys(kind for study in brought for kind in study.presets):
        owners = [study for study in brought if kind in study.presets]
        about = "; ".join(f"{study.name}: one of {', '.join(study.presets[kind])}" for study in owners)
        add(f"--{kind}", metavar="NAME", dest=f"layers.{kind}", help=f"{about} (default: as in params/<study>)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. sweep.n=[4096,8192]; may be repeated")
    add("--dry-run", action="store_true", help="list the cases, their bytes and an estimate of time; start nothing")
    about = "go on with a run that was stopped (default: the latest of this phase); no finished case is repeated"
    add("--resume", nargs="?", const="latest", default="", metavar="FOLDER", help=about)

    about = "then measure N further whole runs, each with kernels chosen anew: together they are one reference"
    add("--again", type=int, default=0, metavar="N", help=about)
    about = "measure a further run (or N, by --again) of this one's reference, as it was; also on another machine"
    add("--of", default="", metavar="FOLDER", help=about)

    add = verb("tune", _tune, "find the fastest right kernels of this machine ahead of a run, and keep them", out=False)
    add("--phase", default="phase1", help="all that this phase asks for here (default: phase1)")

    add = verb("report", _report, "draw the records of a run again, a folder or a zip; measures nothing")
    add("run", type=Path, metavar="FOLDER_OR_ZIP")

    add = verb("compare", _compare, "compare run B with run A, case by case; exit status 1 on a regression", out=False)
    add("a", metavar="A", help="folder of the older run")
    add("b", metavar="B", help="folder of the newer run")
    add("--allow", default="", metavar="WHAT", help="compare all the same: any of hardware,dtype,dirty, by commas")

    add = verb("share", _share, "write index.html of all runs; or pack one run as a zip")
    add("run", nargs="?", type=Path, metavar="RUN", help="folder of the run to pack")

    add = verb("findings", _findings, "weigh all records of a study and write the answer page; measures nothing")
    add("--runs", choices=("all", "reference"), default="all", help="the shipped references alone, or also your own")
    add("--study", default="", metavar="NAME", help="whose records (default: the only study that has findings)")

    add = verb("list", _list, "list the runs, newest first")
    add("--study", default="", metavar="NAME", help="runs of this study alone")
    add("--phase", default="", metavar="NAME", help="runs of this phase alone")
    add("-n", type=int, metavar="N", help="the newest N alone")
    add("--json", action="store_true", help="as JSON, with absolute paths and whole verdicts")
    if asked and not asked.startswith("-") and asked not in verbs.choices:
        raise ParamsError(f"unknown command {asked!r}; {allowed(asked, verbs.choices)}")
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all is well, 1 the run, a check or a comparison failed, 2 refused, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    verb = words[0] if words and not {"-h", "--help"} & set(words) else ""
    said = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words))
    quiet = not verb or os.environ.get("RANK", "0") != "0"  # of a job, rank 0 speaks
    try:
        with contextlib.nullcontext() if quiet else terminal.working(said):
            if verb in ("run", "tune", "findings") and not (ROOT / "params").is_dir():
                raise ParamsError(f"{verb} needs params/ and notebooks/: call it in a clone of the project")
            args, strange = parser(verb).parse_known_args(words)
            if strange := [word for word in strange if word != "--"]:
                options = re.findall(r"\[(--[\w-]+)", args.usage())
                raise ParamsError(f"{args.verb} takes no {strange[0]}; {allowed(strange[0], options)}")
            done = args.do(args)
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # whoever read what is printed, `head` for one, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (BlockShockError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except ModuleNotFoundError as error:
        if (error.name or "blockshock_lib").startswith("blockshock_lib"):
            raise
        print(f"error: {error.name} is missing: pip install 'blockshock-lib[workbook]', or make setup", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED


def _run(args: argparse.Namespace) -> int:
    from blockshock_lib import params
    from blockshock_lib.ranks import torchrun
    from blockshock_lib.runs import machine

    if args.phase in studies.names():  # its phases in a row, as far as all goes well
        for phase in studies.load(args.phase).phases:
            if status := _run(argparse.Namespace(**vars(args) | {"phase": f"{args.phase}/{phase}"})):
                return status
        return DONE
    study = studies.of_phase(args.phase)  # refuses a misspelt one before anything is made
    settings = dict(params.parse_override(text) for text in args.set)
    settings |= {key: name for key, name in vars(args).items() if key.startswith("layers.") and name}
    if args.dry_run:
        from blockshock_lib.runs import dry_run

        if args.resume or args.again or args.of:
            raise ParamsError("--dry-run lists the cases of one new run: leave out --resume, --again and --of")
        choose = {"hardware": args.hardware}
        asked = params.load(study, args.phase, settings, choose=choose, detect=machine.auto_hardware)
        terminal.say(dry_run.dry_run(study, asked, machine.probe(), args.out))
        return DONE
    from blockshock_lib.notebook import workbook

    asked = dict(hardware=args.hardware, settings=settings, said="--set", resume=args.resume, out=args.out)
    job = torchrun.job()
    if args.again < 0:
        raise ParamsError(f"--again: {args.again}; allowed: a whole number from 1")
    if (args.again or args.of) and args.resume:
        raise ParamsError("--again and --of measure runs of their own: leave --resume out")
    if (args.again or args.of) and job:
        raise ParamsError("--again and --of run on one machine, without torchrun; join several as zips (make share)")
    python = shown(sys.executable) if Path.cwd() == ROOT else sys.executable
    anew = "the same command of torchrun with" if job else f"{shlex.quote(python)} -m blockshock_lib run {args.phase}"
    if job:
        return _say(workbook.execute_job(args.phase, job, **asked), anew)
    asked["again"] = args.of or ("new" if args.again else "")
    for _ in range((args.again or 1) if args.of else args.again + 1):
        outcome = workbook.execute(args.phase, **asked)
        if (status := _say(outcome, anew)) != DONE:
            break
        asked = dict(out=args.out, again=args.of or shown(outcome.notebook.parent))
    return status


def _say(outcome, anew: str = "") -> int:
    """The exit status. `anew`: the command that goes on with a run that was stopped, but for the folder."""
    if outcome is None:  # a rank that another one speaks for
        return DONE
    terminal.say(terminal.coloured(outcome.text()))
    if anew and outcome.status != "completed":
        terminal.say(f"go on    {anew} --resume {shlex.quote(shown(outcome.notebook.parent))}")
    return DONE if outcome.ok else STOPPED if outcome.status == "interrupted" else WRONG


def _tune(args: argparse.Namespace) -> int:
    from blockshock_lib import params
    from blockshock_lib.runs import machine
    from blockshock_lib.studies.linear import tune

    chosen = params.load(studies.of_phase(args.phase), args.phase, detect=machine.auto_hardware)
    if chosen.study != "linear":
        raise ParamsError(f"--phase: {args.phase} chooses its kernels as it runs; allowed: a phase of the linear study")
    unsupported = (card := machine.probe())["unsupported"]
    if why := unsupported.get("cuda") or unsupported.get("cslt"):
        raise UnsupportedError(f"nothing can be tuned on this machine: {why}")
    machine.admit(chosen, card)
    return DONE if tune.tune(chosen, terminal.say) else WRONG


def _report(args: argparse.Namespace) -> int:
    from blockshock_lib.notebook import share, workbook

    folder = share.unpack(args.run, args.out / "received" / args.run.stem) if args.run.is_file() else args.run
    return _say(workbook.execute(manifest.read(folder)["phase"], redraw=shown(folder), out=args.out))


def _compare(args: argparse.Namespace) -> int:
    from blockshock_lib.runs.compare import compare

    found = compare(args.a, args.b, allow=tuple(filter(None, args.allow.split(","))))
    terminal.say(found.text())
    return DONE if found.ok else WRONG


def _share(args: argparse.Namespace) -> int:
    from blockshock_lib.notebook import share

    made = (share.pack(args.run) if args.run else share.write_index(args.out)).absolute()
    terminal.say(str(made) if args.run else made.as_uri())
    return DONE


def _findings(args: argparse.Namespace) -> int:
    from blockshock_lib.notebook import findings

    return _say(findings.execute(args.runs, args.study, args.out))


def _list(args: argparse.Namespace) -> int:
    if args.n is not None and args.n < 1:
        raise ParamsError(f"list -n: {args.n}; allowed: a whole number from 1")
    rows, seen = [], {}
    for folder, noted in manifest.every(args.out):
        seen[noted["phase"]] = True
        about = {"verdict": ""} | noted | {"machine": noted["machine"]["title"], "folder": str(folder.absolute())}
        if args.study in ("", about["study"]) and args.phase in ("", about["phase"]):
            rows.append({name: about[name] for name in LIST})
    rows = sorted(rows, key=lambda row: (row["started"], row["folder"]), reverse=True)[: args.n]
    if args.json:
        terminal.say(json.dumps(rows, indent=1))
    elif not rows:
        terminal.say(f"no such runs under {shown(args.out)}" + f"; phases there: {', '.join(seen)}" * bool(seen))
    else:
        for row in rows:  # PASS or FAIL; the rest of the sentence stands on the run's page
            name, _, first = str(row["verdict"]).partition(" · ")[0].partition(": ")
            row |= {"started": row["started"][:16].replace("T", " "), "folder": shown(row["folder"])}
            row |= {"verdict": first[:24] if name == row["phase"] else "–", "machine": row["machine"][:32]}
        terminal.say(terminal.coloured(columns([LIST, *(tuple(row.values()) for row in rows)])))
    return DONE


if __name__ == "__main__":
    warnings.showwarning = lambda message, *_, **__: terminal.say(f"warning: {message}", error=True)
    sys.exit(main())
