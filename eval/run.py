"""Right answers and tokens per forward of a model on a task, for several tau.

    python -m eval.run --model DIR --task gsm8k --data gsm8k_test.jsonl --tau 1,0.95,0.9,0.8 --limit 200
    python -m eval.run --model DIR --task humaneval --allow-code --against out/eval/OTHER.json

Every answer is a line of NAME.samples.jsonl beside the results file NAME.json, written as it comes: the same command goes on where it
was interrupted, also with more values of tau or a higher --limit. Batches are the same then, so that the summary is, times apart.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path

from tqdm import tqdm

from data import ChatTokenizer
from decode import CACHES, MEASURES, generate
from eval.results import command, provenance, weights_sha256, write_results
from eval.tasks import TASKS, Question, Task
from model import UserError, load_pretrained, pack, pick_device, pick_dtype, resolve


def wilson(correct: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    p, zz = correct / n, z * z
    middle, half = (p + zz / (2 * n)) / (1 + zz / n), z * math.sqrt(p * (1 - p) / n + zz / (4 * n * n)) / (1 + zz / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(a: list[bool], b: list[bool], z: float = 1.96) -> dict:
    """Accuracy of a minus that of b on the same questions, with its 95 % interval (Agresti and Min 2005: half a question added to each
    of the two kinds on which they differ, and to each on which they agree, so that an interval never has no width)."""
    only_a, only_b, n = sum(x and not y for x, y in zip(a, b)), sum(y and not x for x, y in zip(a, b)), len(a)
    more, fewer, total = only_a + 0.5, only_b + 0.5, n + 2
    middle, half = (more - fewer) / total, z * math.sqrt(more + fewer - (more - fewer) ** 2 / total) / total
    return {"difference": (only_a - only_b) / n, "low": middle - half, "high": middle + half, "only_here": only_a, "only_there": only_b}


def answer(questions: list[Question], first: int, task: Task, say) -> list[dict]:
    """Samples of one batch of questions, the first of which has this number. say: list of prompts -> list of Generations."""
    began = time.perf_counter()
    answers = say([q.messages for q in questions])
    seconds = (time.perf_counter() - began) / len(questions)
    samples = []
    for index, (q, g) in enumerate(zip(questions, answers), start=first):
        extracted, correct = task.score(g.text, q)
        samples.append({"index": index, "prompt": q.messages, **vars(g), "gold": q.gold, "extracted": extracted, "correct": correct,
                        "seconds": seconds})  # fmt: skip
    return samples


def summary(samples: list[dict]) -> dict:
    """Accuracy with its 95 % interval, and what it cost."""
    n, right = len(samples), sum(s["correct"] for s in samples)
    tokens, forwards = sum(len(s["ids"]) for s in samples), sum(s["n_forward"] for s in samples)
    low, high = wilson(right, n)
    return {"n": n, "accuracy": right / n, "low": low, "high": high, "tokens": tokens, "tokens_per_forward": tokens / forwards,
            "tokens_per_second": tokens / sum(s["seconds"] for s in samples)}  # fmt: skip


def evaluate(model, tokenizer, questions: list[Question], task: Task, tau, block_size, batch_size, max_new_tokens, cache="cursor",
             measure="probability", quiet=False, hold: int = 0, done=(), write=None) -> dict:  # fmt: skip
    """Answer every question at one tau. Returns the row of the results, with the samples under "samples".

    hold: the first so many forwards take one token each, which moves all windows that follow.
    done: samples of an earlier, interrupted run, whole batches of them; write(samples) is called after each new batch.
    """
    samples = list(done)
    one = 0.0 if measure == "entropy" else 1.0
    now = (lambda n_forward: one if n_forward < hold else tau) if hold else tau
    say = lambda prompts: generate(model, tokenizer, prompts, now, block_size, max_new_tokens, cache, measure=measure)
    with tqdm(total=len(questions), initial=len(samples), desc=f"tau {tau:g}", unit="question", disable=quiet, dynamic_ncols=True) as bar:
        for i in range(len(samples), len(questions), batch_size):
            new = [{"tau": tau, **s} for s in answer(questions[i : i + batch_size], i, task, say)]
            samples += new
            if write:
                write(new)
            bar.update(len(new))
            bar.set_postfix(accuracy=f"{sum(s['correct'] for s in samples) / len(samples):.3f}")
    return {"tau": tau, **summary(samples), "samples": samples}


def read_taus(parser, text: str) -> list[float]:
    """The numbers of --tau; anything else ends the program as a wrong option does."""
    try:
        return [float(t) for t in text.split(",")]
    except ValueError:
        parser.error(f"--tau {text}: must be numbers with commas between")


# --------------------------------------------------------------------------------------------- samples kept on disk


def read_samples(file: Path) -> tuple[dict, list[dict]]:
    """(settings, samples) of a samples file; a last line that was not finished is left out."""
    lines = file.read_bytes().split(b"\n")[:-1]
    if not lines:
        return {}, []
    head, *samples = map(json.loads, lines)
    if "settings" not in head:
        raise UserError(f"{file}: its first line is not the settings of a run")
    return head["settings"], samples


def whole_batches(samples: list[dict], tau: float, n: int, batch_size: int) -> list[dict]:
    """Those of one tau, from question 0 on, whose batches are the ones that a run over n questions has."""
    mine = {s["index"]: s for s in samples if s["tau"] == tau}
    there = next((i for i in range(n) if i not in mine), n)
    return [mine[i] for i in range(there if there == n else there // batch_size * batch_size)]


def resume(file: Path, settings: dict, taus: list[float], n: int) -> dict[float, list[dict]]:
    """{tau: samples to keep}; the file then holds those alone, behind the settings. Raises UserError for another run's file."""
    before, samples = read_samples(file) if file.is_file() else ({}, [])
    if before and (changed := [f"{k} was {before.get(k)!r}, is {v!r}" for k, v in settings.items() if before.get(k) != v]):
        raise UserError(f"{file} was made with other settings: {'; '.join(changed)}. Name another --out, or --overwrite")
    kept = {tau: whole_batches(samples, tau, n, settings["batch_size"]) for tau in taus}
    others = [s for s in samples if s["tau"] not in kept or s["index"] >= n]
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".tmp")
    beside.write_text(lines_of([{"settings": settings}, *others, *(s for of in kept.values() for s in of)]), encoding="utf-8")
    beside.replace(file)
    return kept


def lines_of(records: list[dict]) -> str:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


def compare(rows: list[dict], other: Path) -> list[dict]:
    """For each row its paired difference to the other run at the same tau, or at its only tau, on the questions that both answered."""
    settings, samples = read_samples(other.with_name(f"{other.stem}.samples.jsonl"))
    theirs: dict[float, dict] = {}
    for s in samples:
        theirs.setdefault(s["tau"], {})[s["index"]] = s
    found = []
    for row in rows:
        tau = row["tau"] if row["tau"] in theirs else next(iter(theirs)) if len(theirs) == 1 else None
        if tau is None:
            print(f"{other}: has no tau {row['tau']:g} (it has {', '.join(f'{t:g}' for t in theirs)})", file=sys.stderr)
            continue
        pairs = [(s, theirs[tau][s["index"]]) for s in row["samples"] if s["index"] in theirs[tau]]
        different = [a["index"] for a, b in pairs if a["prompt"] != b["prompt"]]
        if different or not pairs:
            raise UserError(f"{other}: question {different[0] if different else 0} is another one there; --against needs the same data")
        same = sum(a["text"] == b["text"] for a, b in pairs) / len(pairs)
        found.append({"tau": row["tau"], "against_tau": tau, "n": len(pairs), "same_text": same,
                      **paired([a["correct"] for a, _ in pairs], [b["correct"] for _, b in pairs])})  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------------ the command


def show(rows: list[dict], against: list[dict], other) -> None:
    print("\n   tau  accuracy  95 % interval   tokens/forward  tokens/s   same as first tau")
    line = "{tau:6g}  {accuracy:8.3f}  {low:.3f} .. {high:.3f}  {tokens_per_forward:14.2f}  {tokens_per_second:8.1f}"
    for r in rows:
        print(line.format(**r), f"{r['identical_to_first_tau']:17.2f}")
    if against:
        print(f"\nagainst {other}, question by question")
        print("   tau  there   right here - there, 95 % interval   only here  only there   same text")
        line = "{tau:6g} {against_tau:6g}  {difference:+.3f}  {low:+.3f} .. {high:+.3f} {only_here:20d} {only_there:11d}  {same_text:10.2f}"
        for r in against:
            print(line.format(**r))


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--task", default="arithmetic", choices=list(TASKS))
    add("--data", default=None, type=Path, metavar="FILE", help="the task's data (default: downloaded once and checked; arithmetic: "
        "generated). gsm8k: question/answer rows or chats; arithmetic: chats that end in #### and a number")
    add("--limit", type=int, default=200, metavar="N", help="the first N questions")
    add("--tau", default="1,0.95,0.9,0.8", metavar="LIST")
    add("--against", type=Path, default=None, metavar="FILE", help="results file of another run: compare question by question")
    add("--allow-code", action="store_true", help="humaneval: run what the model writes (README says what protects you)")
    add = parser.add_argument_group("how").add_argument
    add("--block-size", type=int, default=None, metavar="B", help="candidates per forward (default: as trained)")
    add("--measure", default="probability", choices=MEASURES, help="of confidence (entropy: accept while <= tau nats)")
    add("--hold", type=int, default=0, metavar="N", help="the first N forwards take one token each: moves the windows that follow")
    add("--cache", default="cursor", choices=CACHES)
    add("--batch-size", type=int, default=8, metavar="N")
    add("--max-new-tokens", type=int, default=None, metavar="N", help="default 256, humaneval 512")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="FILE", help="results file (default: out/eval/MODEL-TASK-SETTINGS.json); "
        "every answer goes beside it, to NAME.samples.jsonl")
    add("--overwrite", action="store_true", help="answer all questions anew")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.limit < 1 or args.batch_size < 1 or args.hold < 0 or (args.max_new_tokens is not None and args.max_new_tokens < 1):
        parser.error("--limit, --batch-size and --max-new-tokens must be at least 1, --hold at least 0")
    if args.task == "humaneval" and not args.allow_code:
        parser.error("--task humaneval runs Python programs that the model writes. They get limits, a folder of their own and no network, "
                     "but read the README on what that does not protect; then add --allow-code")
    taus, task = list(dict.fromkeys(read_taus(parser, args.tau))), TASKS[args.task]
    args.max_new_tokens = args.max_new_tokens or task.max_new_tokens
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype)
    questions = task.read(args.data)[: args.limit]
    tokenizer, folder = ChatTokenizer.from_pretrained(args.model), resolve(args.model)
    settings = {k: getattr(args, k) for k in ("model", "task", "block_size", "measure", "cache", "batch_size", "max_new_tokens", "hold")}
    origin = provenance(device, dtype, str(args.data) if args.data else None)
    settings |= {k: origin[k] for k in ("dtype", "data_sha256")} | {"weights_sha256": weights_sha256(folder)}
    mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    out = args.out or Path("out/eval") / f"{folder.parent.name}-{folder.name}-{args.task}-{mark}.json"
    samples_file = out.with_name(out.stem + ".samples.jsonl")
    if args.overwrite:
        samples_file.unlink(missing_ok=True)
    kept = resume(samples_file, settings, taus, len(questions))
    n_kept = sum(map(len, kept.values()))
    print(f"{args.model} on {device}, {settings['dtype']} ({reason}); {len(questions)} questions of {args.data or args.task}"
          f"{f', {n_kept} of {len(questions) * len(taus)} answers are there' if n_kept else ''}\n{samples_file}", flush=True)
    model = pack(load_pretrained(args.model, dtype, device))
    rows = []
    with samples_file.open("a", encoding="utf-8") as file:
        def write(new: list[dict]) -> None:
            file.write(lines_of(new))
            file.flush()

        for tau in taus:
            rows.append(evaluate(model, tokenizer, questions, task, tau, args.block_size, args.batch_size, args.max_new_tokens, args.cache,
                                 args.measure, args.quiet, args.hold, kept[tau], write))
    for r in rows:  # tokens per forward alone can be noise said quickly: how many answers are those of the first tau?
        r["identical_to_first_tau"] = sum(a["ids"] == b["ids"] for a, b in zip(rows[0]["samples"], r["samples"])) / len(questions)
    against = compare(rows, args.against) if args.against else []
    for r in rows:
        del r["samples"]
    show(rows, against, args.against)
    result = {"task": args.task, "n": len(questions), "rows": rows}
    more = {"against": {"file": str(args.against), "rows": against}} if args.against else {}
    write_results(out, result | more | {"settings": settings, "trained": tokenizer.mars, **origin})
    if args.json:
        print(json.dumps(result | more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
