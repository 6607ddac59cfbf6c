"""Kill a training run with SIGKILL at random moments, resume it each time, and compare the end with an undisturbed run, bit by bit.

    python -m eval.crash --kills 10 --out results/crash.json

After every kill the newest checkpoint must load, weights and optimizer, whatever was being written. Each run is a process of its
own: train.py on the tiny model from nothing, both stages, saving after every step, so that many kills meet a half-written checkpoint.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from eval.results import ROOT, command, provenance, write_results
from model import UserError, load_pretrained
from saving import checkpoints

STAGES = "--init scratch --stages sft,mars --data-size 400 --batch-size 16 --micro-tokens 4096".split()
RUN = [*STAGES, "--save-every", "1", "--problems", "0", "--quiet", "--device", "cpu", "--resume", "auto"]


def start(out: Path, steps: int, more) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py"), *RUN, "--steps", str(steps), "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process: subprocess.Popen) -> None:
    _, error = process.communicate()
    if process.returncode:
        raise UserError(f"the run ended with {process.returncode}: {error.strip().splitlines()[-1:]}")


def newest(out: Path) -> str | None:
    """Load the newest checkpoint, weights and optimizer, and return its name; None when there is none yet."""
    found = checkpoints(out)
    if not found:
        return None
    load_pretrained(found[-1])
    torch.load(found[-1] / "trainer_state.pt", weights_only=True)
    return found[-1].name


def losses(out: Path) -> list[tuple]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    return [(r["stage"], r["step"], r["L_mask"], r["L_AR"], r["grad_norm"]) for r in records]


def same(a: Path, b: Path) -> bool:
    """Whether two finished runs have the same losses and weights, to the last bit."""
    weights = lambda out: {(s, k): v for s in ("sft", "mars") for k, v in load_pretrained(out / s).state_dict().items()}
    x, y = weights(a), weights(b)
    return losses(a) == losses(b) and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def crash(folder: Path, kills: int, steps: int, seed: int, more=()) -> dict:
    """The undisturbed run in folder/straight, the other in folder/killed."""
    rng = random.Random(seed)
    straight, killed = folder / "straight", folder / "killed"
    began = time.perf_counter()
    finish(start(straight, steps, more))
    whole = time.perf_counter() - began
    print(f"an undisturbed run takes {whole:.1f} s", flush=True)
    moments, finished = [], []
    while len(moments) < kills:
        process = start(killed, steps, more)
        after = rng.uniform(0.2, 0.8) * whole
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.kill()
        _, error = process.communicate()
        if process.returncode not in (0, -signal.SIGKILL):
            raise UserError(f"the run ended by itself with {process.returncode}: {error.strip().splitlines()[-1:]}")
        if process.returncode == 0:  # it was done before its kill: begin a new run
            finished.append(same(killed, straight))
            print(f"a run of some kills is finished; equal to the undisturbed one: {finished[-1]}", flush=True)
            shutil.rmtree(killed)
            continue
        torn = sorted(p.name for p in killed.glob(".*-step-*.tmp")) if killed.is_dir() else []
        moments.append({"seconds": after, "checkpoint": newest(killed), "torn": torn})
        left = ", ".join(torn) or "nothing"
        print(f"kill {len(moments)} after {after:.1f} s; newest checkpoint {moments[-1]['checkpoint']}, half written: {left}", flush=True)
    finish(start(killed, steps, more))
    return {"kills": moments, "half_written": sum(bool(m["torn"]) for m in moments), "n_steps": len(losses(killed)),
            "runs_equal": [*finished, same(killed, straight)], "left_over": sorted(p.name for p in killed.iterdir())}


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of each of the two stages")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="results file")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.kills < 0 or args.steps < 1:
        parser.error("--kills must be at least 0, --steps at least 1")
    with tempfile.TemporaryDirectory() as folder:
        result = crash(Path(folder), args.kills, args.steps, args.seed)
    good = all(result["runs_equal"])
    print(f"after {args.kills} kills, {result['half_written']} of them while a checkpoint was being written: losses of {result['n_steps']} "
          f"steps and final weights {'equal' if good else 'DIFFER'}")
    if args.out:
        settings = {"steps": args.steps, "run": RUN}
        write_results(args.out, result | {"settings": settings, **provenance("cpu", torch.float32, seed=args.seed)})
    if args.json:
        print(json.dumps(result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
