"""The paper's Tables 2 and 3 on the tiny model: what MARS, its SFT loss and its block size do to the model one token at a time.

    python -m eval.ablation --out results/ablation.json

For every seed a model is trained from nothing (AR SFT), and from it each variant with equally many further steps: AR SFT again,
MARS with B = 4, 8, 16 with and without the SFT loss, and Block Diffusion. All are scored on the same unseen problems, one token per
forward, and MARS at tau 0.95 too. Runs are kept under --work; the same command goes on where it was interrupted.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

import train
from data import ChatTokenizer, arithmetic
from eval import block_diffusion
from eval.results import command, provenance, write_results
from eval.run import evaluate
from eval.tasks import TASKS, numbered
from model import UserError, load_pretrained, read_json, write_json


def variants(blocks: list[int]) -> list[tuple]:
    """(name, block size or None, options of train.py) of every variant. No options: the model all start from, and Block Diffusion."""
    rows = [("AR SFT", None, None), ("AR SFT, as many further steps", None, ["--stages", "sft"])]
    for B in blocks:
        rows.append((f"MARS B={B} without SFT loss", B, ["--stages", "mars", "--block-size", str(B), "--ar-weight", "0"]))
        rows.append((f"MARS B={B}", B, ["--stages", "mars", "--block-size", str(B)]))
    return [*rows, (f"Block Diffusion B={blocks[0]}", blocks[0], None)]


def fine_tune(args, seed: int, init: str, out: Path, steps: int, batch_size: int, lr: float, more: list[str]) -> Path:
    """One run of train.py on generated problems; continued if it was interrupted, not repeated if it is there."""
    argv = ["--init", init, *more, "--data", "arithmetic", "--data-size", steps * batch_size, "--steps", steps, "--batch-size", batch_size,
            "--lr", lr, "--seed", seed, "--dtype", "float32", "--device", "cpu", "--micro-tokens", 4096, "--anchor", "random",
            "--problems", 0, "--val", 0, "--out", out, "--resume", "auto"]  # fmt: skip
    code = train.main([*map(str, argv), *(["--quiet"] if args.quiet else [])])
    if code >= 128:  # a signal, which train.py has answered by saving
        raise KeyboardInterrupt
    if code:
        raise UserError(f"train.py ended with {code} in {out}")
    return out / more[more.index("--stages") + 1]


def model_of(args, seed: int, name: str, block_size, options, base: Path, out: Path) -> Path:
    """Train one variant from `base` and return its folder."""
    if name == "AR SFT":
        return base
    if options is None:
        folder = out / "diffusion"
        if not folder.is_dir():
            block_diffusion.run(base, folder, block_size, args.steps, args.batch_size, args.lr, seed, args.quiet)
        return folder
    return fine_tune(args, seed, str(base), out, args.steps, args.batch_size, args.lr, options)


def score(folder: Path, name: str, block_size, problems) -> dict:
    """Accuracy one token at a time; for MARS also accuracy and tokens per forward at tau 0.95."""
    tokenizer, model = ChatTokenizer.from_pretrained(folder), load_pretrained(folder, torch.float32)
    if name.startswith("Block"):
        found = block_diffusion.evaluate(model, tokenizer, problems, block_size)
        return {"accuracy": found["accuracy"], "tokens_per_forward": found["tokens_per_forward"]}
    questions = numbered([p.messages() for p in problems])
    at = lambda tau: evaluate(model, tokenizer, questions, TASKS["arithmetic"], tau, block_size or 4, 50, 128, quiet=True)
    found = {"accuracy": at(1.0)["accuracy"], "tokens_per_forward": 1.0}
    if name.startswith("MARS"):
        fast = at(0.95)
        found |= {"tokens_per_forward": fast["tokens_per_forward"], "accuracy_at_tau0.95": fast["accuracy"]}
    return found


def summary(runs: dict[str, list[dict]], block_sizes: dict) -> list[dict]:
    """Means over the seeds, with the standard deviation of accuracy."""
    rows = []
    for name, of in runs.items():
        values = [r["accuracy"] for r in of]
        row = {"name": name, "block_size": block_sizes[name], "accuracy": statistics.fmean(values),
               "accuracy_sd": statistics.stdev(values) if len(values) > 1 else None,
               "tokens_per_forward": statistics.fmean(r["tokens_per_forward"] for r in of)}  # fmt: skip
        if "accuracy_at_tau0.95" in of[0]:
            row["accuracy_at_tau0.95"] = statistics.fmean(r["accuracy_at_tau0.95"] for r in of)
        rows.append(row)
    return rows


def markdown(result: dict) -> str:
    """The README's table."""
    lines = ["| | right, one token per forward | at tau 0.95 | tokens per forward there |", "|---|---|---|---|"]
    for r in result["rows"]:
        sd = f" ± {100 * r['accuracy_sd']:.1f}" if r["accuracy_sd"] is not None else ""
        fast = f"{100 * r['accuracy_at_tau0.95']:.1f} % | {r['tokens_per_forward']:.2f}" if "accuracy_at_tau0.95" in r else "|"
        lines.append(f"| {r['name']} | {100 * r['accuracy']:.1f}{sd} % | {fast} |")
    return "\n".join(lines)


def run(args, seeds: list[int], blocks: list[int]) -> dict:
    problems = arithmetic("test", args.problems)
    listed = variants(blocks)
    settings = {k: getattr(args, k) for k in ("sft_steps", "steps", "batch_size", "lr", "problems")}
    settings |= {"blocks": blocks, "anchor": "random"}
    if (before := read_json(args.work / "settings.json")) and before != settings:
        raise UserError(f"{args.work} holds runs of other settings: {before}, now {settings}; name another --work")
    args.work.mkdir(parents=True, exist_ok=True)
    write_json(args.work / "settings.json", settings)
    runs: dict[str, list[dict]] = {name: [] for name, *_ in listed}
    for seed in seeds:
        work = args.work / f"seed{seed}"
        base = fine_tune(args, seed, "scratch", work / "base", args.sft_steps, 16, 1e-3, ["--stages", "sft"])
        for i, (name, block_size, options) in enumerate(listed):
            out = work / f"{i:02d}"
            if not (found := read_json(work / f"{i:02d}.json")):
                found = score(model_of(args, seed, name, block_size, options, base, out), name, block_size, problems)
                write_json(work / f"{i:02d}.json", found)
            runs[name].append(found)
            print(f"seed {seed}  {name:30}{found['accuracy']:7.1%}   {found['tokens_per_forward']:.2f} tokens per forward", flush=True)
    return {"rows": summary(runs, {name: B for name, B, _ in listed}), "runs": runs, "settings": settings | {"seeds": seeds}}


@command
def main(argv=None) -> int:
    mars = train.TINY_STAGES["mars"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--seeds", default="0,1,2", metavar="LIST")
    add("--blocks", default="4,8,16", metavar="LIST", help="block sizes of MARS; Block Diffusion takes the first")
    add("--problems", type=int, default=500, metavar="N", help="unseen problems to score")
    add = parser.add_argument_group("training").add_argument
    add("--sft-steps", type=int, default=1500, metavar="N", 
        help="of 16 problems, from nothing; fewer than tiny-sft's 3750, to leave room above")
    add("--steps", type=int, default=mars["steps"], metavar="N", help="of every variant, from there")
    add("--batch-size", type=int, default=mars["batch_size"], metavar="N")
    add("--lr", type=float, default=mars["lr"])
    add = parser.add_argument_group("output").add_argument
    add("--work", type=Path, default=Path("out/ablation"), metavar="DIR", help="where the runs are kept")
    add("--out", type=Path, default=None, metavar="FILE", help="results file")
    add("--quiet", action="store_true", help="no progress bars")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    lists = {}
    for option, least in (("seeds", 0), ("blocks", 1)):
        try:
            lists[option] = [int(v) for v in getattr(args, option).split(",")]
        except ValueError:
            lists[option] = [-1]
        if min(lists[option]) < least:
            parser.error(f"--{option} {getattr(args, option)}: must be whole numbers of at least {least} with commas between")
    if min(args.problems, args.sft_steps, args.steps, args.batch_size) < 1:
        parser.error("--problems, --sft-steps, --steps and --batch-size must be at least 1")
    result = run(args, lists["seeds"], lists["blocks"])
    print("\n" + markdown(result))
    if args.out:
        write_results(args.out, result | provenance("cpu", torch.float32))
    if args.json:
        print(json.dumps({"rows": result["rows"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
