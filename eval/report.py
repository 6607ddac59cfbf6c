"""One HTML page about a model: what it says forward by forward, what speed costs, whether confidence can be trusted, how it was trained.

    python -m eval.report --model tiny-mars --prompts arithmetic --out report.html
    python -m eval.report --model DIR --prompts FILE --sweep FILE --speed FILE --validate FILE --log RUN/log.jsonl --out report.html

The page is one file that needs no network and nothing beside it; report.html, in this folder, is its template. A part
whose input is not given is left out, and the page says which command makes that input.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from data import ChatTokenizer, arithmetic, final_number, read_chats
from decode import Batch, Generation, Rules, StreamDecoder, accept_prefix, as_tau, candidates, generate, new_cache, one_token
from eval.plot import read_log, smooth
from eval.results import command, provenance
from eval.run import wilson
from eval.speed import markdown
from eval.tasks import last_number
from model import UserError, is_tiny, load_pretrained, pick_device, pick_dtype, read_json

N_ANSWERS = 10
MADE_BY = {  # a part of the page, and what makes its input
    "answers": ("answers", "--prompts FILE or --prompts arithmetic gives the model questions"),
    "sweep": ("accuracy against speed", "python -m eval.sweep --model DIR --out FILE makes the file for --sweep"),
    "speed": ("speed", "python -m eval.speed --model DIR --out FILE makes the file for --speed"),
    "validate": ("calibration", "python -m eval.validate --model DIR --data FILE --out FILE makes the file for --validate"),
    "log": ("training", "python train.py --out RUN makes RUN/log.jsonl for --log"),
}
N_COLOURS = 7  # of the style sheet; with four shapes 28 series can be told apart
METHODS = {"ar": "one token at a time", "mars": "MARS", "jacobi": "Jacobi"}
SHAPES = (  # of the points of a series: circle, square, triangle, diamond
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-4 -4h8v8h-8z", "M0 -5l5 9h-10z", "M0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ what the model says


class Forward(NamedTuple):
    """One forward of one answer: its W candidates, their confidence, and how many of them were taken."""

    ids: list[int]
    confidence: list[float]
    n: int


@torch.inference_mode()
def trace(model, tokenizer, prompt, tau: float, block_size: int, max_new_tokens: int = 256) -> tuple[Generation, list[Forward]]:
    """`decode.decode_cursor` for one row, which keeps what it saw: what `generate` returns, and each of its forwards."""
    rules = Rules.of(tokenizer, model.config.vocab_size, device=model.lm_head.weight.device)
    batch = Batch(model, tokenizer, 1, tau, block_size, max_new_tokens, rules)
    batch.start(0, prompt)
    cache, pending, forwards = new_cache(model, batch, block_size), torch.tensor(batch.prompts), []
    while batch.alive():
        ask = batch.ask()
        masks = torch.full((1, ask.window - 1), rules.mask_id)
        hidden = model(torch.cat([pending, masks], 1).to(batch.device), cache=cache)[:, -ask.window :]  # (1, W, D)
        cache.advance(pending.shape[1])
        ids, confidence = (t.cpu() for t in candidates(model.logits(hidden), rules))                    # (1, W) each
        n = accept_prefix(ids, confidence, ask.tau, ask.limit, rules.eos_ids)
        forwards.append(Forward(ids[0].tolist(), confidence[0].tolist(), int(n)))
        batch.forwarded()
        batch.take(ids, n)
        pending = ids[:, :n]
    return batch.generations[0], forwards


def token_text(tokenizer, token_id: int) -> str:
    """A token as a reader sees it: its text, or its name when it is a special one."""
    return tokenizer.decode([token_id]) or tokenizer.tokenizer.id_to_token(token_id) or f"id {token_id}"


def fates(forward: Forward, tau: float, eos_ids: list[int]) -> list[str]:
    """For each candidate, in words, why it was taken or thrown away."""
    n = forward.n
    failed = forward.ids[n - 1] not in eos_ids and n < len(forward.ids) and forward.confidence[n] < tau
    thrown = ["below tau", *["behind one that failed"] * len(forward.ids)] if failed else ["behind the end"] * len(forward.ids)
    return (["the first always is", *["at least tau"] * (n - 1)] + thrown)[: len(forward.ids)]


def steps_of(tokenizer, prompt, generation: Generation, forwards: list[Forward], tau: float) -> list[dict]:
    """What the page shows of each forward. text: the text it added; taken: the same by token, "" while a character is half there."""
    stream, last = StreamDecoder(tokenizer), len(generation.ids) - 1
    pieces = iter([stream.add([token_id], last=i == last) for i, token_id in enumerate(generation.ids)])
    steps, behind = [], tokenizer.encode_prompt(prompt)[-1]
    for f in forwards:
        rows = zip(f.ids, f.confidence, fates(f, tau, tokenizer.eos_ids))
        shown = [[token_text(tokenizer, i), round(p, 4), fate] for i, p, fate in rows]
        taken = [next(pieces) for _ in range(f.n)]
        steps.append({"last": token_text(tokenizer, behind), "taken": taken, "text": "".join(taken), "n": f.n, "candidates": shown})
        behind = f.ids[f.n - 1]
    return steps


def answer(model, tokenizer, chats: list, tau: float, block_size: int, max_new_tokens: int, quiet: bool, number=last_number) -> dict:
    """Answer the last question of every chat, at tau with a trace, and one token at a time to compare with. number: of an answer's text."""
    prompts = [chat[:-1] if chat[-1]["role"] == "assistant" else chat for chat in chats]
    alone = generate(model, tokenizer, prompts, 1.0, block_size, max_new_tokens)
    rows = []
    for chat, prompt, one in zip(tqdm(chats, unit="answer", disable=quiet, leave=False, dynamic_ncols=True), prompts, alone):
        g, forwards = trace(model, tokenizer, prompt, tau, block_size, max_new_tokens)
        gold = final_number(chat[-1]["content"]) if chat[-1]["role"] == "assistant" else None
        right, right_alone = (None if gold is None else number(text) == gold for text in (g.text, one.text))
        steps = steps_of(tokenizer, prompt, g, forwards, tau)
        rows.append({"question": prompt[-1]["content"], "steps": steps, "n_tokens": len(g.ids), "n_forward": g.n_forward,
                     "cut": g.stop_reason != "eos", "gold": gold, "said": number(g.text), "right": right,
                     "right_alone": right_alone, "same": g.ids == one.ids, "alone": one.text})
    known = [r for r in rows if r["gold"] is not None]
    return {
        "rows": rows, "tau": tau, "block_size": block_size, "one_token": one_token(tau, "probability"),
        "tokens_per_forward": sum(r["n_tokens"] for r in rows) / sum(r["n_forward"] for r in rows),
        "n_known": len(known), "right": sum(r["right"] for r in known), "right_alone": sum(r["right_alone"] for r in known),
        "same": sum(r["same"] for r in rows),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ charts


def ticks(low: float, high: float, n: int = 5) -> list[float]:
    """Up to n + 1 round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / n))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= n)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high; where there are too few, twice and five times those too, or just round numbers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        found = [m * 10.0**e for e in decades for m in factors if low <= m * 10.0**e <= high]
        if len(found) > 1:
            return found
    return ticks(low, high)


def span(values, log: bool = False) -> tuple[float, float]:
    """An axis for these values: a little wider than they are."""
    low, high = min(values), max(values)
    if log:
        return low / 1.2, high * 1.2
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


class Plot:
    """One chart as SVG. Points come in the units of the data; series i has colour i % 7 of the style sheet and shape i % 4."""

    width, height, left, right, top, bottom = 440, 280, 46, 14, 10, 40

    def __init__(self, title: str, x_label: str, xs, ys, log: bool = False, x_ticks: list[tuple] | None = None):
        """xs, ys: (low, high) of the axes; log: of y. x_ticks: (value, label), by default round numbers."""
        self.title, self.xs, self.ys, self.log = title, xs, ys, log
        self.parts, self.names = [], []
        edge, base = self.width - self.right, self.height - self.bottom
        for v in (log_ticks if log else ticks)(*ys):
            self.add('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', self.left, edge, self.y(v), self.y(v))
            self.add('<text class="end" x="{}" y="{:.1f}">{:g}</text>', self.left - 6, self.y(v) + 4, v)
        for v, label in x_ticks or [(v, f"{v:g}") for v in ticks(*xs)]:
            self.add('<text class="mid" x="{}" y="{}">{}</text>', self.x(v), base + 17, label)
        self.add('<text class="end" x="{}" y="{}">{}</text>', edge, self.height - 6, x_label)
        self.add('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>', self.left, edge, base, base)

    def add(self, svg: str, *values) -> None:
        """Markup with values in its places, escaped."""
        self.parts.append(Markup(svg).format(*values))

    def x(self, v: float) -> float:
        low, high = self.xs
        return round(self.left + (v - low) / (high - low) * (self.width - self.left - self.right), 1)

    def y(self, v: float) -> float:
        scale = math.log10 if self.log else float
        low, high, v = (scale(max(a, self.ys[0])) for a in (*self.ys, v))
        return round(self.height - self.bottom - (v - low) / (high - low) * (self.height - self.top - self.bottom), 1)

    def name(self, i: int, text: str) -> None:
        """A series in the legend."""
        self.names.append((i, text))

    def line(self, i: int, points, css: str = "") -> None:
        if not points:
            return
        d = "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.add('<path class="line s{} {}" d="{}"/>', i % N_COLOURS, css, d)

    def dot(self, i: int, x: float, y: float, says: str = "", css: str = "") -> None:
        """A point that says something when pointed at."""
        at = (self.x(x), self.y(y))
        self.add('<g class="dot {}" transform="translate({} {})"><title>{}</title>{}</g>', css, *at, says, shape(i))

    def dots(self, i: int, points, name: str) -> None:
        for x, y in points:
            self.dot(i, x, y, f"{name}, step {x}: {y:.4g}")

    def whisker(self, i: int, x: float, low: float, high: float) -> None:
        ends = (self.x(x), self.y(low), self.y(high))
        self.add('<line class="whisker s{0}" x1="{1}" x2="{1}" y1="{2}" y2="{3}"/>', i % N_COLOURS, *ends)

    def bar(self, x0: float, x1: float, v: float, says: str) -> None:
        box = (self.x(x0) + 1, self.y(v), self.x(x1) - self.x(x0) - 2, self.height - self.bottom - self.y(v))
        self.add('<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>', *box, says)

    def note(self, x: float, text: str) -> None:
        """A line at x, and a word behind its upper end."""
        self.add('<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', self.x(x), self.top, self.height - self.bottom)
        self.add('<text class="note" x="{}" y="{}">{}</text>', self.x(x) + 5, self.top + 4, text)

    def svg(self) -> Markup:
        head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(self.width, self.height, self.title)
        return head + Markup("").join(self.parts) + Markup("</svg>")


def shape(i: int) -> Markup:
    """The point of series i: it can be told by more than its colour."""
    return Markup('<path class="s{}" d="{}"/>').format(i % N_COLOURS, SHAPES[i % len(SHAPES)])


class Table(NamedTuple):
    """Cells are text; the first column is a name. folded: shown on demand."""

    title: str
    head: list[str]
    rows: list[list[str]]
    folded: bool = False


def number(v, digits: int = 3) -> str:
    return "-" if v is None else f"{v:.{digits}f}"


# -------------------------------------------------------------------------------- the parts that are made from a file


def made_from(option: str, file: Path, make) -> dict:
    """What make(file) says, or a UserError that names the file and what it lacks."""
    how = MADE_BY[option[2:]][1]
    if not file.exists():
        raise UserError(f"{option} {file}: no such file; {how}")
    try:
        part = make(file)
    except UserError:  # a ValueError too, and says enough
        raise
    except KeyError as e:
        raise UserError(f"{option} {file}: no field {e}; {how}") from None
    except (AttributeError, IndexError, TypeError, ValueError) as e:
        raise UserError(f"{option} {file}: not what {option} reads ({e}); {how}") from None
    return part | {"file": str(file)}


def origin(result: dict) -> str:
    """Where the numbers of a results file come from, as far as it tells."""
    return ", ".join(str(result[k]) for k in ("command", "commit", "machine", "device", "dtype") if result.get(k))


def training(file: Path) -> dict:
    """Losses of every step and what was seen on held-out chats, from the log of train.py."""
    steps, looks = read_log(file / "log.jsonl" if file.is_dir() else file)
    trained, stages = [r for r in looks if r["stage"] == "mars"], list(dict.fromkeys(r["stage"] for r in steps))
    xs = (0, max(r["at"] for r in [*steps, *looks]))
    values_of = lambda rows, key: [(r["at"], r[key]) for r in rows if r.get(key) is not None and math.isfinite(r[key])]
    of_mask = lambda key, m: [(r["at"], r[key][m]) for r in trained if r[key][m] is not None]

    of_looks = {"L_AR": values_of(looks, "L_AR"), "L_mask": values_of(trained, "L_mask")}  # before MARS, L_mask says nothing
    seen = [v for name in of_looks for _, v in values_of(steps, name) + of_looks[name] if v > 0]
    losses = Plot("loss, nats per token", "step", xs, span(seen, log=True), log=True)
    for i, (name, points) in enumerate(of_looks.items()):
        for stage in stages:
            raw = values_of([r for r in steps if r["stage"] == stage], name)
            mean = [(at, v) for (at, _), v in zip(raw, smooth([v for _, v in raw]))]
            every = max(1, len(raw) // 300)  # as many as can be told apart
            losses.line(i, raw[::every], "raw")
            losses.line(i, mean[::every])
        losses.dots(i, points, f"{name}, held out")
        losses.name(i, name + ", points: held out" * bool(points))
    for stage in stages if len(stages) > 1 else ():
        losses.note(min(r["at"] for r in steps if r["stage"] == stage) - 1, stage)

    plots, tables = [losses], []
    masks = range(len(trained[-1]["L_mask_by_mask"])) if trained else ()
    for title, key, log in (("held-out L_mask of each mask of a block", "L_mask_by_mask", True),
                            ("masks that agree with one token at a time", "agreement_by_mask", False)):
        series = [of_mask(key, m) for m in masks]
        if any(series):
            ys = span([v for points in series for _, v in points if v > 0], log=True) if log else (0, 1)
            plots.append(Plot(title, "step", xs, ys, log))
            for m, points in enumerate(series):
                plots[-1].line(m, points)
                plots[-1].dots(m, points, f"mask {m + 1}")
                plots[-1].name(m, f"mask {m + 1}")
    rates = values_of(trained, "tokens_per_forward")
    if rates:
        plots.append(Plot("tokens per forward at tau 0.95, a few answers", "step", xs, span([v for _, v in rates])))
        plots[-1].line(0, rates)
        plots[-1].dots(0, rates, "tokens per forward")
    if looks:
        head = ["step", "stage", "L_AR", "L_mask", "agreement", "tokens per forward"]
        rows = [[str(r["at"]), r["stage"], *(number(r[k], 4) for k in head[2:5]), number(r.get("tokens_per_forward"), 2)] for r in looks]
        tables.append(Table("Held-out chats, in numbers", head, rows, folded=True))
    last = steps[-1]
    text = f"{len(steps):,} steps ({', '.join(stages)}); the last: L_AR {number(last['L_AR'], 4)}, L_mask {number(last['L_mask'], 4)}."
    return {"id": "training", "title": "Training", "text": text, "plots": plots, "tables": tables, "origin": ""}


def sweep_rows(result: dict) -> list[dict]:
    """Rows of eval.sweep; those of eval.run and eval.quick are given the fields that they leave to their settings."""
    rows = [{"method": "ar", **result["sft"]}, *result["mars"].values()] if "sft" in result and "mars" in result else result["rows"]
    settings, trained = result.get("settings", {}), result.get("trained", {})
    block_size = settings.get("block_size") or trained.get("block_size")
    rows = [{"method": "mars", "measure": settings.get("measure", "probability"), "block_size": block_size} | r for r in rows]
    base, many = None, len({r.get("model") for r in rows}) > 1
    for r in rows:
        r |= {k: float(r[k]) for k in ("accuracy", "low", "high", "tokens_per_forward")}
        if base is None and (r["method"] == "ar" or r["tau"] is not None and one_token(r["tau"], r["measure"])):
            base = r["tokens_per_second"]
        name = [METHODS.get(r["method"], r["method"])]
        if r["method"] != "ar":
            name += [f"B={r['block_size']}"] * bool(r["block_size"]) + [r["measure"]] * (r["measure"] != "probability")
        r["name"] = ", ".join(name + [str(r.get("model"))] * many)
    for r in rows:  # a speed-up that was measured in interleaved rounds is better than a ratio of two long ones
        r["speedup"] = r.get("speedup") or (r["tokens_per_second"] / base if base else None)
    if not rows:
        raise ValueError("it has no rows")
    return rows


def front(points: list[tuple[float, float]]) -> list[bool]:
    """Which points are on the Pareto front: no other is as good in both and better in one."""
    return [not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points) for x, y in points]


def pareto(file: Path) -> dict:
    """Accuracy against speed, in tokens per forward and in tokens per second."""
    result = read_json(file)
    rows = sweep_rows(result)
    interval = lambda r: f"{100 * r['low']:.1f} to {100 * r['high']:.1f}"
    low, high = span([100 * v for r in rows for v in (r["low"], r["high"])])
    plots = []
    for key, label in (("tokens_per_forward", "tokens per forward"), ("speedup", "tokens per second over one token at a time")):
        seen = [r for r in rows if r[key] is not None]
        if not seen:
            continue
        plot = Plot("right, %", label, span([r[key] for r in seen]), (max(0, low), min(100, high)))
        for r, best in zip(seen, front([(r[key], r["accuracy"]) for r in seen])):
            r["front"] = r.get("front", ()) + (key,) * best
        best = [r for r in seen if key in r["front"]]
        plot.line(0, sorted((r[key], 100 * r["accuracy"]) for r in best), "front")
        for i, name in enumerate(dict.fromkeys(r["name"] for r in seen)):
            group = sorted((r for r in seen if r["name"] == name), key=lambda r: r["tau"] or 0)
            plot.line(i, [(r[key], 100 * r["accuracy"]) for r in group])
            for r in group:
                tau = "" if r["tau"] is None else f", tau {r['tau']:g}"
                says = f"{name}{tau}: {100 * r['accuracy']:.1f} % ({interval(r)}) at {r[key]:.2f}"
                plot.whisker(i, r[key], 100 * r["low"], 100 * r["high"])
                plot.dot(i, r[key], 100 * r["accuracy"], says, "" if key in r["front"] else "hollow")
            plot.name(i, name)
        plots.append(plot)
    fronts = {("tokens_per_forward", "speedup"): "both", ("tokens_per_forward",): "tokens per forward", ("speedup",): "speed-up", (): ""}
    head = ["method", "tau", "right", "95 % interval", "tokens per forward", "speed-up", "on the front of"]
    cells = [[r["name"], "-" if r["tau"] is None else f"{r['tau']:g}", f"{100 * r['accuracy']:.1f} %", interval(r),
              number(r["tokens_per_forward"], 2), number(r["speedup"], 2) + "x" * bool(r["speedup"]), fronts[r["front"]]] for r in rows]
    task = f" of {Path(result['task']).name}" if "task" in result else ""
    text = (f"{result['n']:,} questions{task}. A point is one tau, its whisker the 95 % interval. Filled points, on the broken line, are "
            "the Pareto front: no other is as accurate and as fast. Point at one to read it.")
    return {"id": "pareto", "title": "Accuracy against speed", "text": text, "plots": plots,
            "tables": [Table("All points, in numbers", head, cells, folded=True)], "origin": origin(result)}


def speed(file: Path) -> dict:
    """The table of eval.speed, as the README has it."""
    result = read_json(file)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(result).splitlines()]
    s = result["settings"]
    text = (f"Tokens per second over one token at a time with the KV cache (ar), at tau {s['tau']:g}, window {s['window']}: the median of "
            f"{s['rounds']} rounds in which every mode answers the same questions. Only committed tokens count.")
    return {"id": "speed", "title": "Speed", "text": text, "plots": [], "tables": [Table("", head, rows)], "origin": origin(result)}


def calibration(file: Path) -> dict:
    """How often a mask says what one token at a time would say, by its confidence and by its number in the block."""
    result = read_json(file)
    bins = [b for b in result["calibration"] if b["n"]]
    diagram = Plot("agreement with one token at a time", "confidence of the mask", (0, 1), (0, 1))
    diagram.line(0, [(0, 0), (1, 1)], "front")
    for b in bins:
        low, high = wilson(b["agreement"] * b["n"], b["n"])
        says = f"confidence {b['low']:g} to {b['high']:g}: {b['agreement']:.3f} of {b['n']:,} masks agree"
        diagram.whisker(0, b["confidence"], low, high)
        diagram.dot(0, b["confidence"], b["agreement"], says)
    edges = [b["low"] for b in result["calibration"]] + [result["calibration"][-1]["high"]]
    most = max((b["n"] for b in bins), default=1)
    counts = Plot("masks of each confidence", "confidence of the mask", (0, len(edges) - 1), (0.5, 2 * most), log=True,
                  x_ticks=[(i, f"{e:g}".removeprefix("0") or "0") for i, e in enumerate(edges)])
    for i, b in enumerate(result["calibration"]):
        if b["n"]:
            counts.bar(i, i + 1, b["n"], f"confidence {b['low']:g} to {b['high']:g}: {b['n']:,} masks")
    by_mask = [["0 (next token)", number(result["L_AR"], 4), "-"]]
    by_mask += [[str(m), number(loss, 4), number(agree)]
                for m, (loss, agree) in enumerate(zip(result["L_mask_by_mask"], result["agreement_by_mask"]), start=1)]
    rows = []
    for i, b in enumerate(result["calibration"]):
        above = [a for a in result["calibration"][i:] if a["n"]]
        share = sum(a["agreement"] * a["n"] for a in above) / sum(a["n"] for a in above) if above else None
        rows.append([f"{b['low']:.2f} to {b['high']:.2f}", f"{b['n']:,}", number(b["confidence"]), number(b["agreement"]), number(share)])
    agree = "-" if result["agreement"] is None else f"{100 * result['agreement']:.1f} %"
    text = (f"{result['n_chats']:,} held-out chats, {result['n_tokens']:,} answer tokens: {agree} of the masks choose what one token at a "
            "time would. On the diagonal masks agree as often as their confidence says; above it more often. "
            "Whiskers: 95 % intervals, as if every mask were a chat of its own.")
    head = ["confidence", "masks", "mean", "agreement", "of these and all above"]
    return {"id": "calibration", "title": "Can confidence be trusted?", "text": text, "plots": [diagram, counts],
            "tables": [Table("", ["mask of the block", "loss, nats per token", "agreement"], by_mask),
                       Table("Masks by confidence, in numbers", head, rows, folded=True)], "origin": origin(result)}


# -------------------------------------------------------------------------------------------------------- the command


def page(about: dict, parts: list[dict], answers: dict | None, left_out: list[tuple[str, str]]) -> str:
    """The HTML page. Whatever is not Markup is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.render(about=about, parts=parts, answers=answers, left_out=left_out, shape=shape)


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--prompts", default=None, metavar="FILE", help=f"JSONL of chats or question/answer rows, of which {N_ANSWERS} are answered; "
        "arithmetic: unseen problems")
    add("--log", type=Path, default=None, metavar="FILE", help="log.jsonl of train.py, or its folder: losses, held-out losses, agreement")
    add("--sweep", type=Path, default=None, metavar="FILE", help="of eval.sweep (or eval.run, eval.quick): accuracy against speed")
    add("--speed", type=Path, default=None, metavar="FILE", help="of eval.speed: the table")
    add("--validate", type=Path, default=None, metavar="FILE", help="of eval.validate: calibration")
    add = parser.add_argument_group("how to answer").add_argument
    add("--tau", type=float, default=0.9)
    add("--block-size", type=int, default=None, metavar="B", help="candidates per forward (default: as trained)")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the page")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    for option in ("block_size", "max_new_tokens"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least 1")
    as_tau(args.tau, 1, "probability")
    makers = {"sweep": pareto, "speed": speed, "validate": calibration, "log": training}
    parts = [made_from(f"--{name}", file, make) for name, make in makers.items() if (file := getattr(args, name))]
    if args.prompts == "arithmetic":
        chats = [p.messages() for p in arithmetic("test", N_ANSWERS)]
    else:
        chats = read_chats(args.prompts, need_answer=False)[:N_ANSWERS] if args.prompts else []
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(args.model))
    tokenizer, model = ChatTokenizer.from_pretrained(args.model), load_pretrained(args.model, dtype, device)
    block_size = args.block_size or tokenizer.mars.get("block_size", 4)
    print(f"{args.model} on {device}, {str(dtype).removeprefix('torch.')} ({reason}); tau {args.tau:g}, B={block_size}", flush=True)
    number = final_number if args.prompts == "arithmetic" else last_number  # as eval.run scores them
    answers = answer(model, tokenizer, chats, args.tau, block_size, args.max_new_tokens, args.quiet, number) if chats else None
    made = ["answers"] * bool(answers) + [name for name in makers if getattr(args, name)]
    about = {"model": args.model, "parameters": sum(p.numel() for p in model.parameters()), "trained": tokenizer.mars,
             "origin": provenance(device, dtype, args.prompts)}
    html = page(about, parts, answers, [MADE_BY[name] for name in MADE_BY if name not in made])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(html, encoding="utf-8")
    print(f"wrote {args.out}")
    if args.json:
        sections = ["stepper", "answers"] * bool(answers) + [part["id"] for part in parts]
        print(json.dumps({"out": str(args.out), "sections": sections, "bytes": args.out.stat().st_size}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
