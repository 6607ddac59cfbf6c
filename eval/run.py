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
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data import ChatTokenizer
from decode import CACHES, MEASURES, as_tau, generate
from eval import sandbox
from eval.results import command, model_sha256, provenance, write_results
from eval.tasks import TASKS, Question, Task, questions_sha256
from model import UserError, is_tiny, load_pretrained, pack, pick_device, pick_dtype, resolve, write_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


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
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return {"difference": (only_a - only_b) / n, "low": low, "high": high, "only_here": only_a, "only_there": only_b}


def answer(questions: list[Question], first: int, task: Task, say) -> list[dict]:
    """Samples of one batch of questions, the first of which has this number. say: list of prompts -> list of Generations."""
    began = time.perf_counter()
    answers = say([q.messages for q in questions])
    seconds = (time.perf_counter() - began) / len(questions)
    samples = []
    for index, (q, g) in enumerate(zip(questions, answers), start=first):
        extracted, correct = task.score(g.text, q)
        samples.append({"index": index, "prompt": q.messages, **vars(g), "gold": q.gold, "extracted": extracted, "correct": correct,
                        "seconds": seconds, "batch": len(questions)})  # fmt: skip
    return samples


def summary(samples: list[dict]) -> dict:
    """Accuracy with its 95 % interval, and what it cost."""
    n, right = len(samples), sum(s["correct"] for s in samples)
    tokens, forwards = sum(len(s["ids"]) for s in samples), sum(s["n_forward"] for s in samples)
    low, high = wilson(right, n)
    return {"n": n, "accuracy": right / n, "low": low, "high": high, "tokens": tokens, "tokens_per_forward": tokens / forwards,
            "tokens_per_second": tokens / sum(s["seconds"] for s in samples)}  # fmt: skip


def agreement(first: list[list[int]], answers: list[list[int]]) -> tuple[float, float]:
    """How far answers (ids) follow the first ones: the share that is the same to the end, and the share of tokens before a difference."""
    followed = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))) for a, b in zip(first, answers)]
    return sum(a == b for a, b in zip(first, answers)) / len(first), sum(followed) / max(1, sum(map(len, first)))


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


def read_taus(parser, text: str, measure: str = "probability", option: str = "tau") -> list[float]:
    """The numbers of --tau, each once; anything else ends the program as a wrong option does."""
    try:
        taus = list(dict.fromkeys(map(float, text.split(","))))
        as_tau(taus, len(taus), measure)
    except ValueError as e:  # UserError is one
        parser.error(f"--{option} {text}: must be numbers with commas between ({e})")
    return taus


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
    mine, kept = {s["index"]: s for s in samples if s["tau"] == tau and s["batch"] == batch_of(s["index"], n, batch_size)}, []
    for i in range(0, n, batch_size):
        batch = [mine.get(j) for j in range(i, min(i + batch_size, n))]
        if not all(batch):
            break
        kept += batch
    return kept


def batch_of(index: int, n: int, batch_size: int) -> int:
    """How many questions are answered together with this one in a run over n; 0 beyond them."""
    return min(batch_size, n - index // batch_size * batch_size) if index < n else 0


def score_again(samples: list[dict], questions: list[Question], task: Task) -> None:
    """In place. So that a results file never mixes two ways of scoring: that of its code is the one of all its answers."""
    for s in samples:
        s["extracted"], s["correct"] = task.score(s["text"], questions[s["index"]])


def same_run(file: Path, before: dict, settings: dict) -> None:
    """Raises UserError naming every setting that is not what the file was made with. A new file has none."""
    brief = lambda value: repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
    changed = [f"{k} was {brief(before.get(k))}, is {brief(v)}" for k, v in settings.items() if before.get(k) != v]
    if before and changed:
        raise UserError(f"{file} was made with other settings: {'; '.join(changed)}. Name another --out, or --overwrite")


def rewrite(file: Path, settings: dict, samples: list[dict]) -> None:
    """The file with these samples alone, behind the settings; killed meanwhile, it is as before."""
    write_text(file, lines_of([{"settings": settings}, *samples]))


def resume(file: Path, settings: dict, taus: list[float], questions: list[Question], task: Task) -> dict[float, list[dict]]:
    """{tau: samples to keep}, scored again. The file then holds, behind the settings, those and the ones of other taus and limits: only
    an unfinished batch goes. Raises UserError for another run's file."""
    n, size = len(questions), settings["batch_size"]
    before, samples = read_samples(file) if file.is_file() else ({}, [])
    same_run(file, before, settings)
    kept = {tau: whole_batches(samples, tau, n, size) for tau in taus}
    for of in kept.values():
        score_again(of, questions, task)
    others = [s for s in samples if s["tau"] not in kept or s["batch"] != batch_of(s["index"], n, size)]
    rewrite(file, settings, [*others, *(s for of in kept.values() for s in of)])
    return kept


@contextmanager
def only_one(file: Path):
    """Raises UserError while another process writes the same file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(file.name + ".lock").open("w") as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{file}: another process is writing it; give this one an --out of its own") from None
        yield
    file.with_name(file.name + ".lock").unlink(missing_ok=True)


def lines_of(records: list[dict]) -> str:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


def read_other(file: Path, questions: list[Question], taus: list[float], task: str, measure: str) -> dict[float, tuple[float, dict]]:
    """{tau: (tau there, {index: sample})} of the run to compare with: its same tau, of the same measure, or the only one it has.

    Raises UserError when it is no such run, of another task or other questions, or has none of these taus.
    """
    samples_file = file.with_name(f"{file.stem}.samples.jsonl")
    if not samples_file.is_file():
        raise UserError(f"--against {file}: there is no {samples_file.name} beside it; name the results file of a run of eval.run")
    about, samples = read_samples(samples_file)
    if (other := about.get("task", task)) != task:
        raise UserError(f"--against {file}: is of the task {other}, this run of {task}")
    theirs: dict[float, dict] = {}
    for s in samples:
        if "tau" not in s:
            raise UserError(f"--against {file}: not of eval.run, its answers have no tau")
        if s["index"] < len(questions):
            if (s["prompt"], s["gold"]) != (questions[s["index"]].messages, questions[s["index"]].gold):
                raise UserError(f"--against {file}: its question {s['index']} is another one; both runs must have the same data")
            theirs.setdefault(s["tau"], {})[s["index"]] = s
    only = next(iter(theirs)) if len(theirs) == 1 else None
    same = theirs if about.get("measure", measure) == measure else {}
    found = {tau: (there, theirs[there]) for tau in taus if (there := tau if tau in same else only) is not None}
    if missing := [f"{tau:g}" for tau in taus if tau not in found]:
        raise UserError(f"--against {file}: has no tau {', '.join(missing)}; it has {', '.join(f'{t:g}' for t in theirs) or 'no answers'}")
    return found


def compare(rows: list[dict], others: dict) -> list[dict]:
    """For each row its paired difference to the other run, on the questions that both answered."""
    found = []
    for row in rows:
        there, theirs = others[row["tau"]]
        pairs = [(s, theirs[s["index"]]) for s in row["samples"] if s["index"] in theirs]
        same = sum(a["text"] == b["text"] for a, b in pairs) / len(pairs)
        found.append({"tau": row["tau"], "against_tau": there, "n": len(pairs), "same_text": same,
                      **paired([a["correct"] for a, _ in pairs], [b["correct"] for _, b in pairs])})  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------------ the command


DEFAULT_TAUS = {"probability": "1,0.95,0.9,0.8", "margin": "1,0.9,0.6,0.2", "entropy": "0,0.1,0.4,1"}


def show(rows: list[dict], against: list[dict], other) -> None:
    print("\n   tau  accuracy  95 % interval   tokens/forward  tokens/s   as at the first tau: answers, tokens before a difference")
    line = "{tau:6g}  {accuracy:8.3f}  {low:.3f} .. {high:.3f}  {tokens_per_forward:14.2f}  {tokens_per_second:8.1f}"
    for r in rows:
        print(line.format(**r), f"{r['identical_to_first_tau']:28.2f}{r['prefix_of_first_tau']:8.2f}")
    if against:
        print(f"\nagainst {other}, question by question")
        print("   tau  there  answers   right here - there, 95 % interval   only here  only there   same text")
        line = ("{tau:6g} {against_tau:6g} {n:8d}  {difference:+.3f}  {low:+.3f} .. {high:+.3f} {only_here:20d} {only_there:11d}"
                "  {same_text:10.2f}")
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
    add("--tau", default=None, metavar="LIST", help=f"default {DEFAULT_TAUS['probability']} (entropy: {DEFAULT_TAUS['entropy']})")
    add("--against", type=Path, default=None, metavar="FILE", help="results file of another run: compare question by question")
    add("--allow-code", action="store_true", help="humaneval: run what the model writes (README says what protects you)")
    add = parser.add_argument_group("how").add_argument
    add("--block-size", type=int, default=None, metavar="B", help="candidates per forward (default: as trained)")
    add("--measure", default="probability", choices=MEASURES, help="of confidence (entropy: accept while <= tau nats)")
    add("--hold", type=int, default=0, metavar="N", help="the first N forwards take one token each (cache block: N-1, its prefill "
        "counts): moves the windows that follow")
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
    for option, least in (("limit", 1), ("batch_size", 1), ("block_size", 1), ("max_new_tokens", 1), ("hold", 0)):
        if (value := getattr(args, option)) is not None and value < least:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least {least}")
    if args.task == "humaneval" and not args.allow_code:
        parser.error("--task humaneval runs Python programs that the model writes. They get limits and a folder of their own, "
                     "but read the README on what that does not protect; then add --allow-code")
    taus, task = read_taus(parser, args.tau or DEFAULT_TAUS[args.measure], args.measure), TASKS[args.task]
    args.max_new_tokens = args.max_new_tokens or task.max_new_tokens
    every = task.read(args.data)
    questions = every[: args.limit]
    others = read_other(args.against, questions, taus, args.task, args.measure) if args.against else {}
    tokenizer, folder = ChatTokenizer.from_pretrained(args.model), resolve(args.model)
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(folder))
    origin = provenance(device, dtype, str(args.data) if args.data else None)
    settings = {k: getattr(args, k) for k in ("model", "task", "block_size", "measure", "cache", "batch_size", "max_new_tokens", "hold")}
    settings |= {"device": origin["device"], "dtype": origin["dtype"]}
    settings |= {"model_sha256": model_sha256(folder), "questions_sha256": questions_sha256(every)}
    if args.task == "humaneval":
        settings["sandbox"] = sandbox.mode()
    mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    out = args.out or Path("out/eval") / f"{folder.parent.name}-{folder.name}-{args.task}-{mark}.json"
    samples_file = out.with_name(out.stem + ".samples.jsonl")
    with only_one(samples_file):
        if args.overwrite:
            samples_file.unlink(missing_ok=True)
        kept = resume(samples_file, settings, taus, questions, task)
        n_kept = sum(map(len, kept.values()))
        print(f"{args.model} on {device}, {settings['dtype']} ({reason}); {len(questions)} questions of {args.data or args.task}"
              f"{f', {n_kept} of {len(questions) * len(taus)} answers are there' if n_kept else ''}", flush=True)
        print(f"{samples_file}{', programs run in mode ' + settings['sandbox'] if args.task == 'humaneval' else ''}", flush=True)
        model = pack(load_pretrained(args.model, dtype, device))
        if n_kept < len(questions) * len(taus):  # a warm-up that does not count
            generate(model, tokenizer, [q.messages for q in questions[: args.batch_size]], 1.0, max_new_tokens=2)
        with samples_file.open("a", encoding="utf-8") as file:
            def write(new: list[dict]) -> None:
                file.write(lines_of(new))
                file.flush()

            how = (args.block_size, args.batch_size, args.max_new_tokens, args.cache, args.measure, args.quiet, args.hold)
            rows = [evaluate(model, tokenizer, questions, task, tau, *how, kept[tau], write) for tau in taus]
    for r in rows:  # tokens per forward alone can be noise said quickly: how many answers are those of the first tau?
        ids, first = ([s["ids"] for s in of["samples"]] for of in (r, rows[0]))
        r["identical_to_first_tau"], r["prefix_of_first_tau"] = agreement(first, ids)
    against = compare(rows, others) if others else []
    for r in rows:
        del r["samples"]
    show(rows, against, args.against)
    result = {"task": args.task, "n": len(questions), "rows": rows}
    more = {"against": {"file": str(args.against), "rows": against}} if args.against else {}
    about = {"settings": settings, "from_an_earlier_call": n_kept, "trained": tokenizer.mars}
    write_results(out, result | more | about | origin)
    if args.json:
        print(json.dumps(result | more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
