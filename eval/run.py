"""Accuracy and tokens per forward of a model on questions whose answers end in "#### number", for several tau.

An answer is right when the number after its last #### equals the reference; an answer without one is wrong.

    python -m eval.run --model DIR --data gsm8k_test.jsonl --tau 1,0.95 --limit 50 --out results/NAME.json
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from tqdm import tqdm

from data import ChatTokenizer, arithmetic, final_number, read_chats
from decode import CACHES, MEASURES, generate
from eval.results import command, provenance, write_results
from model import UserError, load_pretrained, pick_device, pick_dtype


def wilson(correct: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    p, zz = correct / n, z * z
    middle, half = (p + zz / (2 * n)) / (1 + zz / n), z * math.sqrt(p * (1 - p) / n + zz / (4 * n * n)) / (1 + zz / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def evaluate(model, tokenizer, chats, tau, block_size, batch_size, max_new_tokens, cache, measure="probability", quiet=False,
             hold: int = 0) -> dict:
    """Answer every chat's last turn at one tau. Returns the row of the results, with the samples under "samples".

    hold: the first so many forwards take one token each, which moves all windows that follow.
    """
    samples, seconds = [], 0.0
    one = 0.0 if measure == "entropy" else 1.0
    now = (lambda n_forward: one if n_forward < hold else tau) if hold else tau
    with tqdm(total=len(chats), desc=f"tau {tau:g}", unit="question", disable=quiet) as bar:
        for i in range(0, len(chats), batch_size):
            part = chats[i : i + batch_size]
            began = time.perf_counter()
            done = generate(model, tokenizer, [c[:-1] for c in part], now, block_size, max_new_tokens, cache, measure=measure)
            seconds += time.perf_counter() - began
            for chat, g in zip(part, done):
                gold, said = final_number(chat[-1]["content"]), final_number(g.text)
                scored = {"gold": gold, "extracted": said, "correct": said is not None and said == gold}
                samples.append({"prompt": chat[:-1], **vars(g), **scored})
            bar.update(len(part))
            bar.set_postfix(accuracy=f"{sum(s['correct'] for s in samples) / len(samples):.3f}")
    n, right = len(samples), sum(s["correct"] for s in samples)
    tokens, forwards = sum(len(s["ids"]) for s in samples), sum(s["n_forward"] for s in samples)
    low, high = wilson(right, n)
    return {"tau": tau, "n": n, "accuracy": right / n, "low": low, "high": high, "tokens": tokens, "tokens_per_forward": tokens / forwards,
            "tokens_per_second": tokens / seconds, "samples": samples}


def read_taus(parser, text: str) -> list[float]:
    """The numbers of --tau; anything else ends the program as a wrong option does."""
    try:
        return [float(t) for t in text.split(",")]
    except ValueError:
        parser.error(f"--tau {text}: must be numbers with commas between")


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--data", default="arithmetic", metavar="FILE", help="JSONL of chats or question/answer rows; arithmetic: unseen problems")
    add("--limit", type=int, default=200, metavar="N", help="the first N questions")
    add("--tau", default="1,0.95,0.9,0.8", metavar="LIST")
    add = parser.add_argument_group("how").add_argument
    add("--block-size", type=int, default=None, metavar="B")
    add("--measure", default="probability", choices=MEASURES, help="of confidence (entropy: accept while <= tau nats)")
    add("--hold", type=int, default=0, metavar="N", help="the first N forwards take one token each: moves the windows that follow")
    add("--cache", default="cursor", choices=CACHES)
    add("--batch-size", type=int, default=8, metavar="N")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="FILE", help="results file; every answer goes beside it, to NAME.samples.jsonl")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.limit < 1 or args.batch_size < 1 or args.hold < 0:
        parser.error("--limit and --batch-size must be at least 1, --hold at least 0")
    taus = read_taus(parser, args.tau)
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype)
    chats = [p.messages() for p in arithmetic("test", args.limit)] if args.data == "arithmetic" else read_chats(args.data)[: args.limit]
    wrong = [i for i, c in enumerate(chats) if c[-1]["role"] != "assistant" or final_number(c[-1]["content"]) is None]
    if wrong:
        raise UserError(f"{args.data}: chat {wrong[0] + 1} does not end in an answer with #### and a number")
    tokenizer = ChatTokenizer.from_pretrained(args.model)
    model = load_pretrained(args.model, dtype, device)
    print(f"{args.model} on {device}, {str(dtype).removeprefix('torch.')} ({reason}); {len(chats)} questions of {args.data}")
    how = (args.block_size, args.batch_size, args.max_new_tokens, args.cache, args.measure)
    rows = [evaluate(model, tokenizer, chats, tau, *how, hold=args.hold) for tau in taus]
    for r in rows:  # tokens per forward alone can be noise said quickly: how many answers are those of the first tau?
        r["identical_to_first_tau"] = sum(a["ids"] == b["ids"] for a, b in zip(rows[0]["samples"], r["samples"])) / len(chats)
    samples = [s | {"tau": r["tau"]} for r in rows for s in r["samples"]]
    for r in rows:
        del r["samples"]
    print("\n   tau  accuracy  95 % interval   tokens/forward  tokens/s   same as first tau")
    line = "{tau:6g}  {accuracy:8.3f}  {low:.3f} .. {high:.3f}  {tokens_per_forward:14.2f}  {tokens_per_second:8.1f}"
    for r in rows:
        print(line.format(**r), f"{r['identical_to_first_tau']:17.2f}")
    result = {"task": args.data, "n": len(chats), "rows": rows}
    if args.out:
        settings = {k: getattr(args, k) for k in ("model", "block_size", "measure", "cache", "batch_size", "max_new_tokens", "hold")}
        write_results(args.out, result | {"settings": settings, "trained": tokenizer.mars, **provenance(device, dtype, args.data)})
        lines = "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples)
        args.out.with_name(args.out.stem + ".samples.jsonl").write_text(lines, encoding="utf-8")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
