"""The README's "change this line" experiments: each changes one line or flag, trains the tiny MARS model, and scores it.

    python -m eval.experiments --out results/experiments.json                  all of them, about three quarters of an hour on two cores
    python -m eval.experiments --only leak --out out/leak.json                 one

A changed line is changed in a temporary copy of the code, so the working tree stays as it is.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from eval.results import ROOT, provenance, write_results
from model import UserError

TAUS = "1,0.95,0.8,0.5"
CPU = ["--device", "cpu", "--dtype", "float32"]


class Experiment(NamedTuple):
    name: str
    command: list[str]              # of train.py (then scored), or of eval.run on the shipped model
    old: str = ""                   # this line of train.py, which occurs once, ...
    new: str = ""                   # ... is changed into this one
    score: list[str] = []           # more flags of eval.run, which scores what train.py made


TRAIN = ["train.py"]
SCORE = ["-m", "eval.run", "--model", "checkpoints/tiny-mars"]
EXPERIMENTS = [
    Experiment("as it is", TRAIN),
    Experiment("longer blocks", [*TRAIN, "--block-size", "8"]),
    Experiment("lower learning rate", [*TRAIN, "--lr", "2e-4"]),
    Experiment("higher learning rate", [*TRAIN, "--lr", "2e-3"]),
    Experiment("no AR loss", [*TRAIN, "--ar-weight", "0"]),
    Experiment("blocks from the answer's start", [*TRAIN, "--anchor", "start"]),
    Experiment("the same with windows moved by two", [*TRAIN, "--anchor", "start"], score=["--hold", "2"]),
    Experiment("random blocks with windows moved by two", [*SCORE, "--hold", "2"]),
    Experiment("blocks from position 0", [*TRAIN, "--anchor", "0"]),
    Experiment("bidirectional block", TRAIN, "noisy_to_noisy = noisy_q & noisy_k & (start_k == start_q) & (pos_k <= pos_q)",
               "noisy_to_noisy = noisy_q & noisy_k & (start_k == start_q)"),
    Experiment("random masking", TRAIN, "positions[i, at : at + n] = p",
               "positions[i, at : at + n], input_ids[i, at : at + n] = p, torch.where(torch.rand(n) < 0.5, x[start:end], mask_id)"),
    Experiment("leak", TRAIN, "noisy_to_clean = noisy_q & ~noisy_k & (pos_k < start_q)",
               "noisy_to_clean = noisy_q & ~noisy_k & (pos_k < pos_q)"),
    Experiment("no shift", TRAIN, "labels[i, at : at + n - 1] = x[start + 1 : end]", "labels[i, at : at + n] = x[start:end]"),
    Experiment("[MASK] from its untrained row", TRAIN, "start_mask_embedding(model, tokenizer)", "pass"),
    Experiment("window of 5", [*SCORE, "--block-size", "5"]),
    Experiment("window of 8", [*SCORE, "--block-size", "8"]),
    Experiment("entropy", [*SCORE, "--measure", "entropy", "--tau", "0,0.1,0.4,1"]),
    Experiment("margin", [*SCORE, "--measure", "margin", "--tau", "1,0.9,0.6,0.2"]),
]


def copy_of_the_code(folder: Path) -> None:
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("eval", "checkpoints"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def changed(source: str, e: Experiment) -> str:
    """train.py with the experiment's line changed. Raises UserError unless the line occurs once."""
    if not e.old:
        return source
    new, n = re.subn(rf"(?m)^( +){re.escape(e.old)}(?= *(?:#.*)?$)", lambda m: m[1] + e.new, source)
    if n != 1:
        raise UserError(f"experiment {e.name!r}: train.py must hold this line once: {e.old}")
    return new


def prepared(e: Experiment, seed: int, made: dict) -> Path:
    """A folder with the changed code and, where it is to be trained, the model in run/mars; `made` holds those there are."""
    key = (tuple(e.command), e.old, e.new)
    if key not in made:
        made[key] = tempfile.TemporaryDirectory()
        folder = Path(made[key].name)
        copy_of_the_code(folder)
        (folder / "train.py").write_text(changed((folder / "train.py").read_text(encoding="utf-8"), e), encoding="utf-8")
        if e.command[0] == "train.py":
            more = [*CPU, "--seed", str(seed), "--problems", "0", "--save-every", "0", "--out", "run"]
            subprocess.run([sys.executable, *e.command, *more], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return Path(made[key].name)


def run(e: Experiment, n_problems: int, seed: int, made: dict) -> list[dict]:
    """[{"tau", "accuracy", "low", "high", "tokens_per_forward"}] of one experiment."""
    score = ["-m", "eval.run", "--model", "run/mars"] if e.command[0] == "train.py" else e.command  # the window: as trained
    score = [*score, *e.score]
    taus = [] if "--tau" in score else ["--tau", TAUS]
    more = ["--limit", str(n_problems), "--batch-size", "50", "--max-new-tokens", "128", "--json"]
    command = [sys.executable, *score, *taus, *CPU, *more]
    done = subprocess.run(command, cwd=prepared(e, seed, made), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["rows"]


def table(done: dict) -> str:
    """The README's table."""
    taus = [float(tau) for tau in TAUS.split(",")]
    lines = ["| try | change | " + " | ".join(f"tau {tau:g}" for tau in taus) + " |", "|---|---|" + "---|" * len(taus)]
    for name, e in done.items():
        flags = " ".join([*e["command"][len(TRAIN if e["command"][0] == "train.py" else SCORE) :], *e["score"]])
        change = f"`{e['new']}`" if e["new"] else f"`{flags}`" if flags else ""
        label = "" if [r["tau"] for r in e["rows"]] == taus else "{tau:g}: "
        cells = [(label + "{right:.1f} % at {tokens_per_forward:.2f}").format(right=100 * r["accuracy"], **r) for r in e["rows"]]
        lines.append(f"| {name} | {change} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", default=None, metavar="NAME[,NAME]", help=", ".join(e.name for e in EXPERIMENTS))
    parser.add_argument("--problems", type=int, default=300, metavar="N", help="unseen problems to score on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE",
                        help="results file; what it has already, with the same settings, is not run again")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    names = [e.name for e in EXPERIMENTS]
    only = args.only.split(",") if args.only else names
    if unknown := [name for name in only if name not in names]:
        parser.error(f"--only {', '.join(unknown)}: allowed are {', '.join(names)}")

    def finished() -> dict:  # read anew each time: two processes may share the file
        done = json.loads(args.out.read_text(encoding="utf-8"))["experiments"] if args.out.is_file() else {}
        return {name: done[name] for name in names if name in done}

    done, made = finished(), {}
    try:
        for e in (e for e in EXPERIMENTS if e.name in only):
            about = {"command": e.command, "old": e.old, "new": e.new, "score": e.score, "n": args.problems, "seed": args.seed}
            if {k: done.get(e.name, {}).get(k) for k in about} != about:
                print(f"{e.name}: python {' '.join(e.command)}{f'   with   {e.new}' if e.old else ''}", flush=True)
                rows = run(e, args.problems, args.seed, made)
                done = finished() | {e.name: about | {"rows": rows, "made": provenance("cpu", torch.float32)}}
                write_results(args.out, {"experiments": {name: done[name] for name in names if name in done}})
            shown = "tau {tau:g}: {accuracy:.1%} at {tokens_per_forward:.2f}"
            print("   ".join(shown.format(**r) for r in done[e.name]["rows"]), flush=True)
        print(table(done))
    except (UserError, subprocess.CalledProcessError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"experiments": done}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
