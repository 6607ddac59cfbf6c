"""Live tau under load: the paper's "real-time speed adjustment", measured.

Requests arrive at random: for a while fewer than a server that takes one token per forward can answer, then more, then fewer again.
Three servers meet the same requests: tau fixed at 1, tau fixed at a fast value, and a controller that lowers tau while requests wait
and restores it.
Rows are refilled as soon as they are free (continuous batching on the cursor cache).

    python -m eval.load --model tiny-mars --out results/load.json --plot pictures/load.png
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from data import ChatTokenizer, arithmetic, final_number
from decode import Batch, Generation, Rules, cursor_step
from eval.results import command, provenance, write_results
from eval.run import wilson
from kvcache import KVCache
from model import UserError, is_tiny, load_pretrained, pick_device, pick_dtype


class Server:
    """n_rows rows of one cache, each answering a prompt of its own; `admit` fills a free row, `step` is one forward of all.

    max_prompt, max_new_tokens: in tokens, per row. rules: what `decode.Rules.of` takes. A row i is free while batch.limit[i] is 0;
    its answer is batch.generations[i]. Raises UserError for a prompt that is too long, ValueError for a row that is not free.
    """

    def __init__(self, model, tokenizer, n_rows: int, max_prompt: int, window: int = 4, max_new_tokens: int = 128, **rules):
        device = model.lm_head.weight.device
        self.model, self.max_prompt = model, max_prompt
        rules = Rules.of(tokenizer, model.config.vocab_size, device=device, **rules)
        self.batch = Batch(model, tokenizer, n_rows, 1.0, window, max_new_tokens, rules)
        self.cache = KVCache(model.config, n_rows, max_prompt + max_new_tokens + 2 * window, model.lm_head.weight.dtype, device)
        self.pending, self.n_pending = torch.zeros(n_rows, window, dtype=torch.long), torch.zeros(n_rows, dtype=torch.long)

    def admit(self, i: int, prompt, tau: float, seed: int = 0) -> None:
        """Row i answers prompt from now on. The prompt is read by a forward of its row alone, so that no other row is padded to it."""
        if self.batch.limit[i]:
            raise ValueError(f"row {i} is not free")
        self.batch.start(i, prompt, seed)
        ids = self.batch.prompts[i]
        if len(ids) > self.max_prompt:
            self.batch.limit[i] = 0
            raise UserError(f"a prompt of {len(ids)} tokens; this server was made for {self.max_prompt}")
        self._forward(slice(i, i + 1), self.cache.row(i), torch.tensor([ids]), torch.tensor([len(ids)]), tau)

    def step(self, tau: float) -> None:
        """One forward of all rows; every row that is not free takes one or more tokens."""
        self._forward(slice(None), self.cache, self.pending, self.n_pending, tau)

    def _forward(self, rows: slice, cache, pending, n_pending, tau: float) -> None:
        batch = self.batch
        batch.tau = tau
        ask = batch.ask(rows)
        ids, n = torch.zeros_like(self.pending), torch.zeros_like(self.n_pending)
        ids[rows, : ask.window], n[rows] = cursor_step(self.model, cache, pending, n_pending, ask, batch.rules)
        batch.forwarded(rows)
        batch.take(ids, n)
        self.pending[rows], self.n_pending[rows] = ids[rows], n[rows]
        free = batch.limit == 0  # nothing of these rows is read any more
        self.n_pending[free], self.cache.cursor[free] = 0, 0


@dataclass
class Request:
    question: str
    gold: float
    arrives: float                      # seconds from the start
    seed: int = 0                       # of sampling
    finished: float = math.nan
    generation: Generation | None = None


class Clock:
    """Seconds from its making; a test puts another one in its place."""

    def __init__(self):
        self.began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.began

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


@torch.inference_mode()
def serve(server: Server, requests: list[Request], policy, clock) -> list[tuple]:
    """Answer all requests (sorted by arrival), first come first served. policy: number of requests for which no row is free -> tau.

    Fills in the requests; returns one (seconds, waiting, busy rows, tau) per step.
    """
    batch, trace, upcoming, waiting, serving = server.batch, [], requests[::-1], [], {}
    while upcoming or waiting or serving:
        while upcoming and upcoming[-1].arrives <= clock.now():
            waiting.append(upcoming.pop())
        if not waiting and not serving:
            clock.wait_until(upcoming[-1].arrives)
            continue
        free = (batch.limit == 0).nonzero().flatten().tolist()
        tau = policy(max(0, len(waiting) - len(free)))
        for i in free[: len(waiting)]:
            serving[i] = waiting.pop(0)
            server.admit(i, serving[i].question, tau, serving[i].seed)
        trace.append((clock.now(), len(waiting), len(serving), tau))
        if batch.alive():
            server.step(tau)
        for i in [i for i in serving if not batch.limit[i]]:
            serving[i].finished, serving[i].generation = clock.now(), batch.generations[i]
            del serving[i]
    return trace


def arrivals(phases, seed: int) -> list[float]:
    """Poisson arrival times for phases [(requests per second, seconds), ...] that follow each other."""
    rng, times, begin = random.Random(seed), [], 0.0
    for rate, seconds in phases:
        at = begin
        while (at := at + rng.expovariate(rate)) < begin + seconds:
            times.append(at)
        begin += seconds
    return times


def controller(low: float, patience: int):
    """The policy: tau 1 while nobody waits, then down in a straight line, to `low` at `patience` waiting requests or more."""
    return lambda waiting: 1 - (1 - low) * min(1, waiting / patience)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(name: str, requests: list[Request], trace: list[tuple], ends: list[float]) -> dict:
    """What one server made of the requests. ends: when each phase ends, in seconds."""
    late = [r.finished - r.arrives for r in requests]
    rush = [r.finished - r.arrives for r in requests if ends[0] <= r.arrives < ends[1]]
    right = sum(final_number(r.generation.text) == r.gold for r in requests)
    tokens, forwards = sum(len(r.generation.ids) for r in requests), sum(r.generation.n_forward for r in requests)
    in_rush = [r for r in requests if ends[0] <= r.finished < ends[1]]
    low, high = wilson(right, len(requests))
    return {
        "policy": name, "n": len(requests), "p50": percentile(late, 0.5), "p95": percentile(late, 0.95), "p99": percentile(late, 0.99),
        "p95_of_the_rush": percentile(rush, 0.95), "accuracy": right / len(requests), "low": low, "high": high,
        "tokens_per_forward": tokens / forwards, "finished_per_second_in_the_rush": len(in_rush) / (ends[1] - ends[0]),
        "most_waiting": max(w for _, w, _, _ in trace), "mean_tau": statistics.fmean(tau for *_, tau in trace),
        "lowest_tau": min(tau for *_, tau in trace), "last_tau": trace[-1][-1],
        # after the rush, until nobody waits
        "seconds_to_clear": next((t - ends[1] for t, w, _, _ in trace if t >= ends[1] and not w), None),
    }  # fmt: skip


def table(result: dict) -> str:
    s = result["settings"]
    calm, rush = s["calm"] * result["capacity"], s["rush"] * result["capacity"]
    lines = [f"{s['rows']} rows serve {result['capacity']:.1f} requests/s at tau 1; "
             f"{calm:.1f}/s arrive, then {rush:.1f}/s, then {calm:.1f}/s",
             "server                 right   95 % interval   latency p50     p95     p99"
             "   in the rush: p95   done/s   tau mean   lowest   at the end"]
    for r in result["rows"]:
        interval = f"{r['low']:.1%}..{r['high']:.1%}"
        lines.append(f"{r['policy']:20}{r['accuracy']:8.1%}{interval:>16}{r['p50']:12.2f} s{r['p95']:6.2f} s{r['p99']:6.2f} s"
                     f"{r['p95_of_the_rush']:17.2f} s{r['finished_per_second_in_the_rush']:9.1f}"
                     f"{r['mean_tau']:11.3f}{r['lowest_tau']:9.2f}{r['last_tau']:13.2f}")
    lines.append(f"p95 latency of tau 1 over the controller's: {result['p95_ratio']:.1f}")
    return "\n".join(lines)


def markdown(result: dict) -> str:
    """The README's table."""
    lines = ["| server | right | latency, half below | 95 % below | 95 % of the rush below | answered per second in the rush "
             "| mean tau | tau at the end |",
             "|---|---|---|---|---|---|---|---|"]
    for r in result["rows"]:
        lines.append(f"| {r['policy']} | {r['accuracy']:.1%} | {r['p50']:.2f} s | {r['p95']:.2f} s | {r['p95_of_the_rush']:.2f} s | "
                     f"{r['finished_per_second_in_the_rush']:.1f} | {r['mean_tau']:.3f} | {r['last_tau']:g} |")
    return "\n".join(lines)


def plot(runs: dict, ends: list[float], file: Path) -> None:
    """Waiting requests, tau and latency over time. runs: {policy: (requests, trace)}."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (waiting, tau, late) = plt.subplots(3, 1, figsize=(8, 6), sharex=True)
    for (name, (requests, trace)), colour in zip(runs.items(), ("#555555", "#5b9bd5", "#c0392b")):
        t = [row[0] for row in trace]
        waiting.plot(t, [row[1] for row in trace], color=colour, lw=1, label=name)
        tau.plot(t, [row[3] for row in trace], color=colour, lw=1)
        done = sorted(requests, key=lambda r: r.arrives)
        late.plot([r.arrives for r in done], [r.finished - r.arrives for r in done], ".", ms=2.5, color=colour)
    for ax, label in ((waiting, "waiting"), (tau, "tau"), (late, "latency, s")):
        ax.axvspan(ends[0], ends[1], color="#f3efe2", zorder=0)
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
    late.set_yscale("log")
    late.set_xlabel("seconds (latency: of the request that arrived then); shaded: more arrive than tau 1 can serve")
    waiting.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=150)
    print(f"wrote {file}")


def run(args) -> dict:
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(args.model))
    model, tokenizer = load_pretrained(args.model, dtype, device), ChatTokenizer.from_pretrained(args.model)
    window = args.window if args.window is not None else tokenizer.mars.get("block_size", 4)
    args.patience = args.patience if args.patience is not None else args.rows
    print(f"{args.model} on {device}, {str(dtype).removeprefix('torch.')} ({reason}); {args.rows} rows, window {window}", flush=True)
    questions = arithmetic("test", args.questions)
    longest = max(len(tokenizer.encode_prompt(p.question)) for p in questions)
    new_server = lambda: Server(model, tokenizer, args.rows, longest, window)

    def requests(times) -> list[Request]:
        return [Request(p.question, float(p.result), t) for t, p in zip(times, (questions[i % len(questions)] for i in range(len(times))))]

    def capacity(tau: float) -> float:
        """Requests per second when there is always one waiting."""
        many = requests([0.0] * (12 * args.rows))
        serve(new_server(), many, lambda waiting: tau, Clock())
        done = sorted(r.finished for r in many)
        return (len(many) - args.rows) / (done[-args.rows] - done[0])  # between the first to finish and the last to wait

    capacity(1.0)  # warm up
    at_one = statistics.median(capacity(1.0) for _ in range(3))
    seconds = args.seconds
    phases = list(zip([args.calm * at_one, args.rush * at_one, args.calm * at_one], seconds))
    ends, times = [sum(seconds[: i + 1]) for i in range(3)], arrivals(phases, args.seed)
    if not any(ends[0] <= t < ends[1] for t in times):
        raise UserError(f"--rush {args.rush:g}: no request came in these {seconds[1]:g} seconds; raise it, or --seconds")
    policies = {"tau 1": lambda waiting: 1.0, f"tau {args.tau_fixed:g}": lambda waiting: args.tau_fixed,
                f"controlled, {args.tau_low:g}..1": controller(args.tau_low, args.patience)}
    runs = {}
    for name, policy in policies.items():
        print(f"serving {len(times)} requests with {name} ...", flush=True)
        mine = requests(times)
        runs[name] = mine, serve(new_server(), mine, policy, Clock())
    rows = [summary(name, mine, trace, ends) for name, (mine, trace) in runs.items()]
    names = ("model", "rows", "calm", "rush", "seconds", "tau_low", "tau_fixed", "patience", "questions")
    result = {"rows": rows, "capacity": at_one, "p95_ratio": rows[0]["p95"] / rows[2]["p95"]}
    result["settings"] = {k: getattr(args, k) for k in names}
    print(table(result))
    if args.out:
        write_results(args.out, result | provenance(device, dtype, "arithmetic", args.seed))
    if args.plot:
        plot(runs, ends, args.plot)
    return result


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", default="tiny-mars", metavar="NAME|DIR", help="one that answers arithmetic problems")
    add("--questions", type=int, default=1000, metavar="N", help="different problems; when more arrive they come again")
    add = parser.add_argument_group("load").add_argument
    add("--rows", type=int, default=8, metavar="N", help="of the batch")
    add("--calm", type=float, default=0.5, metavar="X", help="arrivals per second before and after, over what tau 1 serves")
    add("--rush", type=float, default=1.6, metavar="X", help="and in between")
    add("--seconds", default="15,30,45", metavar="A,B,C", help="calm, rush, calm")
    add("--seed", type=int, default=0, help="of the arrivals")
    add = parser.add_argument_group("servers").add_argument
    add("--tau-fixed", type=float, default=0.9)
    add("--tau-low", type=float, default=0.95, help="the least the controller takes")
    add("--patience", type=int, default=None, metavar="N", help="waiting requests at which it takes it (default: as many as rows)")
    add("--window", type=int, default=None, metavar="W")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="FILE", help="results file")
    add("--plot", type=Path, default=None, metavar="FILE", help="picture over time (needs matplotlib)")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    try:
        args.seconds = [float(s) for s in args.seconds.split(",")]
    except ValueError:
        args.seconds = []
    if len(args.seconds) != 3 or not all(0 < s < math.inf for s in args.seconds):
        parser.error("--seconds: must be three numbers above 0 with commas between")
    for option in ("rows", "questions", "patience", "window"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option} {value}: must be at least 1")
    for option in ("calm", "rush"):
        if not 0 < getattr(args, option) < math.inf:
            parser.error(f"--{option} {getattr(args, option)}: must be above 0 and finite")
    for option in ("tau_low", "tau_fixed"):
        if not 0 <= getattr(args, option) <= 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: must be within 0..1")
    result = run(args)
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
