"""Block sizes, thresholds and measures of confidence on one task: the paper's Table 8, and the Pareto plot.

    python -m eval.sweep --model tiny-mars --blocks 2,4,5 --out out/sweep.json --plot out/sweep.png

Each batch of questions is answered by one token at a time (`ar`), Jacobi decoding and every setting, each time in another order, so
that all share whatever else the machine does; a speed-up is the median over the batches of tokens per second over `ar`. The same command
goes on behind the last batch that all had answered. --model may name several, with commas: trained with other block sizes, or before MARS.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data import ChatTokenizer
from decode import MEASURES, generate
from eval import jacobi, sandbox
from eval.results import command, model_sha256, provenance, write_results
from eval.run import agreement, answer, lines_of, only_one, read_samples, read_taus, rewrite, same_run, score_again, summary
from eval.tasks import TASKS, questions_sha256
from model import UserError, is_tiny, load_pretrained, pack, pick_device, pick_dtype, resolve

TAUS = {"probability": "0.99,0.95,0.9,0.8,0.7,0.6,0.5", "margin": "0.99,0.9,0.8,0.6,0.4,0.2,0", "entropy": "0.02,0.1,0.2,0.4,0.7,1,1.5"}


class Setting(NamedTuple):
    model: str
    method: str             # ar | jacobi | mars
    block_size: int
    measure: str
    tau: float


def settings_of(models: dict, blocks: list[int], measures: list[str], taus: dict, with_jacobi: bool) -> list[Setting]:
    """models: {name: trained block size}."""
    found = []
    for name, trained in models.items():
        sizes = blocks or [trained]
        found.append(Setting(name, "ar", 1, "probability", 1.0))
        found += [Setting(name, "jacobi", B, "probability", 1.0) for B in sizes if with_jacobi and B > 1]
        found += [Setting(name, "mars", B, m, tau) for m in measures for B in sizes for tau in taus[m]]
    return found


def sayer(s: Setting, model, tokenizer, max_new_tokens: int):
    if s.method == "jacobi":
        return lambda prompts: jacobi.generate(model, tokenizer, prompts, s.block_size, max_new_tokens)
    return lambda prompts: generate(model, tokenizer, prompts, s.tau, s.block_size, max_new_tokens, measure=s.measure)


def in_turn(listed: list[Setting], i: int) -> list[Setting]:
    """The order of round i, drawn anew for every round, so that none is always near `ar` or always far from it."""
    return random.Random(i).sample(listed, len(listed))


def summarize(listed: list[Setting], samples: list[dict], batch_size: int) -> list[dict]:
    """A row per setting, in order, with its speed-up over `ar` of the same model and the share of answers that are the same as there.

    A last batch that is shorter than the others has no part in the speed-up.
    """
    by = {s: [] for s in listed}
    for sample in samples:
        by[Setting(*sample["setting"])].append(sample)
    rows = []
    for s, mine in by.items():
        plain = by[Setting(s.model, "ar", 1, "probability", 1.0)]
        rate = lambda of: sum(len(x["ids"]) for x in of) / sum(x["seconds"] for x in of)
        whole = range(0, max(batch_size, len(mine) - batch_size + 1), batch_size)
        ratios = [rate(mine[i : i + batch_size]) / rate(plain[i : i + batch_size]) for i in whole]
        identical, prefix = agreement(*([x["ids"] for x in of] for of in (plain, mine)))
        rows.append({**s._asdict(), **summary(mine), "speedup": statistics.median(ratios), "speedups": ratios,
                     "identical_to_ar": identical, "prefix_of_ar": prefix})  # fmt: skip
    return rows


def steepest(rows: list[dict]) -> list[dict]:
    """For each curve the two neighbouring taus between which accuracy falls most, from slow to fast: is there a cliff, and where?"""
    found = []
    for key in dict.fromkeys((r["model"], r["block_size"], r["measure"]) for r in rows if r["method"] == "mars"):
        curve = [r for r in rows if r["method"] == "mars" and (r["model"], r["block_size"], r["measure"]) == key]
        curve.sort(key=lambda r: r["tau"], reverse=key[2] != "entropy")
        drops = [(a["accuracy"] - b["accuracy"], a["tau"], b["tau"]) for a, b in zip(curve, curve[1:])]
        if drops and max(drops)[0] > 0:
            drop, before, after = max(drops)
            found.append({"model": key[0], "block_size": key[1], "measure": key[2], "drop": drop, "from_tau": before, "to_tau": after})
    return found


def short(models) -> dict[str, str]:
    """{model: the end of its path, as much as tells it from the others}."""
    models = list(dict.fromkeys(models))
    for n in range(1, 20):
        names = ["/".join(Path(m).parts[-n:]) for m in models]
        if len(set(names)) == len(models):
            break
    return dict(zip(models, names))


def markdown(rows: list[dict]) -> str:
    """The paper's Table 8 for each measure: a line per tau, a column per model and block size, "right at tokens per forward"."""
    lines = []
    names = short(r["model"] for r in rows)
    many = len(names) > 1
    cell = lambda r: f"{100 * r['accuracy']:.1f} % at {r['tokens_per_forward']:.2f}"
    label = lambda r: (f"{names[r['model']]}, " if many else "") + f"B={r['block_size']}"
    for measure in dict.fromkeys(r["measure"] for r in rows if r["method"] == "mars"):
        mine = [r for r in rows if r["method"] == "mars" and r["measure"] == measure]
        columns = list(dict.fromkeys(label(r) for r in mine))
        lines += ["", f"| {measure} | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for tau in dict.fromkeys(r["tau"] for r in mine):
            lines.append(f"| {tau:g} | " + " | ".join(cell(r) for r in mine if r["tau"] == tau) + " |")
    lines += ["", "| without masks | right at tokens per forward | speed-up |", "|---|---|---|"]
    for r in rows:
        if r["method"] != "mars":
            name = "one token at a time" if r["method"] == "ar" else f"Jacobi, {r['block_size']} a forward"
            lines.append(f"| {name}{', ' + names[r['model']] if many else ''} | {cell(r)} | {r['speedup']:.2f}x |")
    return "\n".join(lines[1:])


def detail(rows: list[dict]) -> str:
    """One curve in full: with intervals, and how far its answers follow those of one token at a time (see eval.run.agreement)."""
    head = ("right, 95 % interval", "tokens per forward", "speed-up", "answers unchanged", "tokens before a change")
    lines = [f"| | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for r in rows:
        name = {"ar": "one token at a time", "jacobi": f"Jacobi, {r['block_size']} a forward"}.get(r["method"], f"tau {r['tau']:g}")
        right, low, high, same, before = (100 * r[k] for k in ("accuracy", "low", "high", "identical_to_ar", "prefix_of_ar"))
        lines.append(f"| {name} | {right:.1f} %, {low:.1f} .. {high:.1f} | {r['tokens_per_forward']:.2f} | {r['speedup']:.2f}x "
                     f"| {same:.0f} % | {before:.0f} % |")
    return "\n".join(lines)


def plot(rows: list[dict], file: Path) -> None:
    """Accuracy against tokens per forward and against wall clock; a line per model, block size and measure."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--plot: pip install matplotlib") from None
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    names, curve_of = short(r["model"] for r in rows), lambda r: (r["model"], r["method"], r["block_size"], r["measure"])
    widths = list(dict.fromkeys((r["model"], r["block_size"]) for r in rows))  # these by colour, measures by line and point
    looks = {"probability": ("o", "-"), "entropy": ("D", "--"), "margin": ("v", ":")}
    for axis, x, name in zip(axes, ("tokens_per_forward", "speedup"), ("tokens per forward", "tokens per second, one token at a time = 1")):
        for curve in dict.fromkeys(map(curve_of, rows)):
            mine = [r for r in rows if curve_of(r) == curve]
            model, method, block_size, measure = curve
            text = {"ar": "one at a time", "jacobi": f"Jacobi, {block_size}"}.get(method, f"B={block_size}, {measure}")
            y = [100 * r["accuracy"] for r in mine]
            bars = [[100 * (r["accuracy"] - r["low"]) for r in mine], [100 * (r["high"] - r["accuracy"]) for r in mine]]
            marker, line = looks[measure] if method == "mars" else ("s" if method == "ar" else "*", "none")
            label, colour = f"{names[model]}: {text}" if len(names) > 1 else text, f"C{widths.index((model, block_size)) % 10}"
            axis.errorbar([r[x] for r in mine], y, bars, label=label, color=colour, marker=marker, ls=line,
                          ms=4 if method == "mars" else 9, lw=1.2, elinewidth=0.4)
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("right, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
    print(f"wrote {file}")


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR[,...]")
    add("--task", default="arithmetic", choices=list(TASKS))
    add("--data", default=None, type=Path, metavar="FILE", help="as for eval.run")
    add("--limit", type=int, default=200, metavar="N", help="the first N questions")
    add("--allow-code", action="store_true", help="humaneval: run what the model writes")
    add = parser.add_argument_group("settings").add_argument
    add("--blocks", default=None, metavar="LIST", help="candidates per forward (default: as trained)")
    add("--measures", default="probability", metavar="LIST", help=f"of {','.join(MEASURES)}")
    for measure, taus in TAUS.items():
        add(f"--tau-{measure}", default=taus, metavar="LIST", help=f"default {taus}")
    add("--no-jacobi", action="store_true", help="leave Jacobi decoding out")
    add = parser.add_argument_group("how").add_argument
    add("--batch-size", type=int, default=25, metavar="N")
    add("--max-new-tokens", type=int, default=None, metavar="N", help="default 256, humaneval 512")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="results file; every answer goes beside it, to NAME.samples.jsonl")
    add("--plot", type=Path, default=None, metavar="FILE", help="picture (needs matplotlib)")
    add("--overwrite", action="store_true", help="answer all questions anew")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    measures = list(dict.fromkeys(args.measures.split(",")))
    if unknown := [m for m in measures if m not in MEASURES]:
        parser.error(f"--measures {','.join(unknown)}: allowed are {', '.join(MEASURES)}")
    for option in ("limit", "batch_size", "max_new_tokens"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least 1")
    if args.task == "humaneval" and not args.allow_code:
        parser.error("--task humaneval runs programs that the model writes: read the README on it, then add --allow-code")
    blocks = list(dict.fromkeys(args.blocks.split(","))) if args.blocks else []
    if wrong := [b for b in blocks if not (b.isdecimal() and int(b))]:
        parser.error(f"--blocks {','.join(wrong)}: must be whole numbers of at least 1 with commas between")
    blocks = list(map(int, blocks))
    taus = {m: read_taus(parser, getattr(args, f"tau_{m}"), m, f"tau-{m}") for m in measures}
    names, task = list(dict.fromkeys(args.model.split(","))), TASKS[args.task]
    args.max_new_tokens = args.max_new_tokens or task.max_new_tokens
    every = task.read(args.data)
    questions = every[: args.limit]
    tokenizers = {name: ChatTokenizer.from_pretrained(name) for name in names}
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, all(map(is_tiny, names)))
    origin = provenance(device, dtype, str(args.data) if args.data else None)
    listed = settings_of({n: t.mars.get("block_size", 4) for n, t in tokenizers.items()}, blocks, measures, taus, not args.no_jacobi)
    about = {k: getattr(args, k) for k in ("task", "limit", "batch_size", "max_new_tokens")} | {"settings": [list(s) for s in listed]}
    about |= {"device": origin["device"], "dtype": origin["dtype"], "questions_sha256": questions_sha256(every)}
    about["models_sha256"] = [model_sha256(resolve(name)) for name in names]
    if args.task == "humaneval":
        about["sandbox"] = sandbox.mode()
    file = args.out.with_name(args.out.stem + ".samples.jsonl")
    with only_one(file):
        if args.overwrite:
            file.unlink(missing_ok=True)
        before, samples = read_samples(file) if file.is_file() else ({}, [])
        same_run(file, before, about)
        per_round, n_all = len(listed) * args.batch_size, len(listed) * len(questions)
        score_again(samples, questions, task)
        samples = samples if len(samples) == n_all else samples[: len(samples) // per_round * per_round]  # whole rounds
        rewrite(file, about, samples)
        print(f"{args.model} on {device}, {origin['dtype']} ({reason}); {len(listed)} settings, {len(questions)} questions of "
              f"{args.data or args.task}\n{file}", flush=True)
        models = {name: pack(load_pretrained(name, dtype, device)) for name in names}
        say = {s: sayer(s, models[s.model], tokenizers[s.model], args.max_new_tokens) for s in listed}
        if len(samples) < n_all:  # a warm-up that does not count
            for name in names:
                generate(models[name], tokenizers[name], [q.messages for q in questions[: args.batch_size]], 0.9, max_new_tokens=8)
        with tqdm(total=n_all, initial=len(samples), unit="answer", disable=args.quiet, dynamic_ncols=True) as bar:
            for i in range(len(samples) // len(listed), len(questions), args.batch_size):
                for s in in_turn(listed, i // args.batch_size):
                    new = [{"setting": list(s), **x} for x in answer(questions[i : i + args.batch_size], i, task, say[s])]
                    samples += new
                    with file.open("a", encoding="utf-8") as f:
                        f.write(lines_of(new))
                    bar.update(len(new))
    rows = summarize(listed, samples, args.batch_size)
    cliffs = steepest(rows)
    curves = {(r["model"], r["block_size"], r["measure"]) for r in rows if r["method"] == "mars"}
    print("\n" + (markdown if len(curves) > 1 else detail)(rows) + "\n")
    for c in cliffs:
        print(f"{c['model']}, B={c['block_size']}, {c['measure']}: accuracy falls most between tau {c['from_tau']:g} and {c['to_tau']:g}, "
              f"by {100 * c['drop']:.1f} points")
    result = {"task": args.task, "n": len(questions), "rows": rows}
    write_results(args.out, result | {"steepest": cliffs, "settings": {k: v for k, v in about.items() if k != "settings"}, **origin})
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
