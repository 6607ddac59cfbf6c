"""What MARS did to a tiny model, on problems it never saw: accuracy, tokens per forward and speed, before and after.

`train.py` ends with this table on arithmetic problems; the same by hand, with more of them:

    python -m eval.quick --sft checkpoints/tiny-sft --mars checkpoints/tiny-mars --problems 2000
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from tqdm import tqdm

from data import ChatTokenizer, arithmetic
from eval.results import command, provenance, write_results
from eval.run import evaluate, read_taus
from eval.speed import our_mode, ratios, rounds
from eval.tasks import TASKS, read_arithmetic
from model import is_tiny, load_pretrained, pick_device, pick_dtype

TAUS = (1.0, 0.95, 0.9, 0.8, 0.5)
MAX_NEW_TOKENS = 128  # the longest answer has 80


def speedups(modes, tokenizer, questions, block_size, batch_size: int, bar) -> list[float]:
    """Tokens per second of every mode, (model, tau), over those of the first: the median ratio of many short rounds."""
    settings = dict(block_size=block_size, max_new_tokens=MAX_NEW_TOKENS)
    named = {i: our_mode(model, tokenizer, tau, **settings) for i, (model, tau) in enumerate(modes)}
    timings = rounds(named, [questions[i : i + batch_size] for i in range(0, len(questions), batch_size)], bar)
    return [statistics.median(ratios(timings[i], timings[0])) for i in named]


def measure(sft, mars, tokenizer, n_problems: int, block_size=None, taus=TAUS, n_rounds: int = 4, quiet: bool = False) -> dict:
    """Score both models on the first n_problems of the test split, and time them at batch 1 and 16.

    Timing takes n_rounds rounds of 16 questions and four times as many of one; each has questions of its own.
    sft: the model before MARS, decoded one token at a time. mars: the model after, at every tau (or None). Returns {"sft": {...},
    "mars": {"tau1": {"accuracy", "low", "high", "tokens_per_forward", "speedup", "speedup_batch16", "identical_to_before"}, ...}}.
    """
    problems = read_arithmetic(None, n_problems)
    modes = [(sft, 1.0), *((mars, tau) for tau in taus if mars is not None)]
    rows = []
    with tqdm(modes, desc="scoring", unit="run", disable=quiet, leave=False, dynamic_ncols=True) as bar:
        for model, tau in bar:
            rows.append(evaluate(model, tokenizer, problems, TASKS["arithmetic"], tau, block_size, 100, MAX_NEW_TOKENS, quiet=True))
    questions = [p.question for p in arithmetic("test", 16 * (n_rounds + 1))]
    with tqdm(total=len(modes) * (5 * n_rounds + 2), desc="timing", unit="run", disable=quiet, leave=False, dynamic_ncols=True) as bar:
        alone = speedups(modes, tokenizer, questions[: 4 * n_rounds + 1], block_size, 1, bar)
        batched = speedups(modes, tokenizer, questions, block_size, 16, bar)
    samples = [row.pop("samples") for row in rows]
    for row, said, a, b in zip(rows, samples, alone, batched):
        row |= {"speedup": a, "speedup_batch16": b}
        row["identical_to_before"] = sum(x["ids"] == y["ids"] for x, y in zip(said, samples[0])) / n_problems
    return {"n": n_problems, "sft": rows[0], "mars": {f"tau{tau:g}": row for tau, row in zip(taus, rows[1:])}}


def table(result: dict) -> str:
    """The result of `measure`, as it is printed."""
    head = f"{result['n']} unseen problems"
    lines = [f"{head:24}right   95 % interval   tokens/forward   speed-up, batch 1   batch 16"]
    for name, r in [("before MARS", result["sft"]), *((f"MARS, tau {r['tau']:g}", r) for r in result["mars"].values())]:
        interval = f"{r['low']:.1%} .. {r['high']:.1%}"
        lines.append(f"{name:22}{r['accuracy']:7.1%}{interval:>17}{r['tokens_per_forward']:16.2f}"
                     f"{r['speedup']:18.2f}x{r['speedup_batch16']:10.2f}x")
    return "\n".join(lines)


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--sft", required=True, metavar="DIR", help="the model before MARS")
    parser.add_argument("--mars", required=True, metavar="DIR", help="the model after MARS")
    parser.add_argument("--problems", type=int, default=500, metavar="N")
    parser.add_argument("--tau", default=",".join(f"{tau:g}" for tau in TAUS), metavar="LIST")
    parser.add_argument("--rounds", type=int, default=20, metavar="N",
                        help="of timing: N rounds of 16 questions, 4N of one; their median counts")
    parser.add_argument("--block-size", type=int, default=None, metavar="B", help="candidates per forward (default: as trained)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="results file")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.problems < 1 or args.rounds < 1:
        parser.error("--problems and --rounds must be at least 1")
    taus = read_taus(parser, args.tau)
    began = time.perf_counter()
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(args.mars))
    tokenizer = ChatTokenizer.from_pretrained(args.mars)
    sft, mars = (load_pretrained(folder, dtype, device) for folder in (args.sft, args.mars))
    print(f"{args.sft} and {args.mars} on {device}, {str(dtype).removeprefix('torch.')} ({reason})", flush=True)
    result = measure(sft, mars, tokenizer, args.problems, args.block_size, taus, args.rounds)
    result["seconds"] = time.perf_counter() - began
    print(table(result))
    if args.out:
        settings = {"sft": args.sft, "mars": args.mars, "block_size": args.block_size, "rounds": args.rounds}
        write_results(args.out, result | {"settings": settings, "trained": tokenizer.mars, **provenance(device, dtype, "arithmetic")})
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
