"""Wall clock, the paper's Table 5: tokens per second of every way to decode, over one token at a time with a KV cache.

    python -m eval.speed --model tiny-mars --batch 1,4,8,16 --tau 0.95 --peer transformers --out results/NAME.json

In a round every mode answers the same questions, one mode after the other, so that they share whatever else the machine
does; a ratio is the median of the ratios of many rounds. The first round only warms up. Modes:

    ar            one token per forward, cursor cache          cursor        several tokens, every row at its own cursor
    none          several tokens, no cache                     transformers  its generate(), greedy, default cache, same
    block4 ..     several tokens, the paper's cache                          weights, prompts and dtype (--peer)
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from data import ChatTokenizer, arithmetic, read_chats
from decode import Rules, candidates, generate
from eval.results import command, provenance, write_results
from kvcache import KVCache
from model import MLP, PackedLinear, RMSNorm, UserError, is_tiny, load_pretrained, pack, pick_device, pick_dtype, resolve

MODES = "ar,none,block4,block8,block16,block32,block64,cursor"


class Timing(NamedTuple):
    """One batch answered. tokens and forwards are sums over its rows; only committed tokens count."""

    tokens: int
    forwards: int
    seconds: float
    prefill: float          # of the seconds: the forward that reads the prompt
    prefill_tokens: int     # of the tokens: what that forward took
    ids: list[list[int]]
    peak_mb: float | None = None


def rounds(modes: dict, groups: list, bar) -> dict[str, list[Timing]]:
    """{name: a Timing for every group after the first}. modes: {name: function of a list of prompts that returns a Timing}."""
    timings = {name: [] for name in modes}
    for group in groups:
        for name, mode in modes.items():
            timings[name].append(mode(group))
            bar.update()
    return {name: of[1:] for name, of in timings.items()}


def ratios(timings: list[Timing], base: list[Timing]) -> list[float]:
    """Tokens per second over those of base, round by round."""
    return [(t.tokens / t.seconds) / (b.tokens / b.seconds) for t, b in zip(timings, base)]


def our_mode(model, tokenizer, tau: float, **settings):
    """A mode of our decoder. The prefill ends where tau is asked for with one forward done."""

    def run(prompts) -> Timing:
        first = []

        def ask_tau(n_forward):
            if n_forward and not first:
                synchronize(model)
                first.append(time.perf_counter())
            return tau

        peak = start_peak(model)
        began = time.perf_counter()
        done = generate(model, tokenizer, prompts, ask_tau, **settings)
        ended = time.perf_counter()
        tokens, forwards = sum(len(g.ids) for g in done), sum(g.n_forward for g in done)
        prefilled = 0 if settings.get("cache") == "block" else sum(g.accepted[0] for g in done)
        return Timing(tokens, forwards, ended - began, (first or [ended])[0] - began, prefilled, [g.ids for g in done], peak())

    return run


def transformers_mode(folder: Path, tokenizer, dtype, device, max_new_tokens: int):
    """A mode of transformers: greedy generate() with its default cache. Left-padded batches, as its documentation asks for.

    Its time includes making ids of the prompts and text of the answers, as ours does.
    """
    try:
        from transformers import AutoModelForCausalLM, GenerationConfig
    except ImportError:
        raise UserError("--peer transformers: pip install transformers") from None
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ends = dict(eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.eos_ids[0])
    peer.generation_config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, **ends)  # no penalties of the folder's

    @torch.inference_mode()
    def run(prompts) -> Timing:
        first = []

        def after_a_token(*args, **kwargs):
            if not first:
                synchronize(peer)
                first.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool, device=device)

        peak = start_peak(peer)
        began = time.perf_counter()
        rows = [tokenizer.encode_prompt(p) for p in prompts]
        width = max(map(len, rows))
        input_ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=device)
        attention_mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
        out = peer.generate(input_ids, attention_mask=attention_mask, stopping_criteria=[after_a_token])
        said = [whole(ids, tokenizer.eos_ids) for ids in out[:, width:].tolist()]
        for ids in said:
            tokenizer.decode(ids)
        ended = time.perf_counter()
        tokens = sum(map(len, said))
        return Timing(tokens, tokens, ended - began, first[0] - began, len(said), said, peak())

    return run


def whole(ids: list[int], eos_ids) -> list[int]:
    """ids up to the first EOS, which is included."""
    ends = [i for i, token_id in enumerate(ids) if token_id in eos_ids]
    return ids[: ends[0] + 1] if ends else ids


# ------------------------------------------------------------------------------------------------ memory and limits


def synchronize(model) -> None:
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.synchronize()


def start_peak(model):
    """Begin to watch the peak of memory. Returns a function that tells it in MB.

    On CUDA: of its tensors. On Linux: of the resident memory of the whole process, with what other modes left behind and
    every model that is loaded. Elsewhere None.
    """
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return lambda: torch.cuda.max_memory_allocated() / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return lambda: None
    status = Path("/proc/self/status")
    return lambda: next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def interleaved(functions: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each function over `repeats` interleaved calls, after one to warm up."""
    seconds = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, f in functions.items():
            began = time.perf_counter()
            f()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(of[1:]) for name, of in seconds.items()}


@torch.inference_mode()
def forward_seconds(model, tokenizer, batch: int, widths, context: int, repeats: int) -> dict[int, float]:
    """Median seconds of one decoding step of each width, from a cursor at `context`: forward, logits, choice and confidence."""
    c = model.config
    cache = KVCache(c, batch, context + max(widths), model.lm_head.weight.dtype, model.lm_head.weight.device)
    cache.advance(context)
    rules = Rules.of(tokenizer, c.vocab_size, device=cache.k.device)

    def step(width):
        # the cursor stays: each call writes the same slots
        hidden = model(torch.full((batch, width), 5, device=cache.k.device), cache=cache)
        candidates(model.logits(hidden), rules)[1].cpu()

    return interleaved({w: lambda w=w: step(w) for w in widths}, repeats)


def weight_bytes(model) -> int:
    """Bytes of the weights that a step of one token reads."""
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return n_bytes if model.config.tie_word_embeddings else n_bytes - model.model.embed_tokens.weight.nbytes  # one row of it is read


@torch.inference_mode()
def limits(n_bytes: int, seconds_of_a_step: float, dtype, device, window: int, packed: bool, repeats: int) -> dict:
    """What this machine can do. GB/s of the weights in a one-token step, of one large linear on one row, and of plain reading.

    linear_window_over_one: time of the linear on `window` rows over one row, a bound for window_over_ar_forward.
    """
    big = torch.nn.Linear(8192, 16384, bias=False, dtype=dtype, device=device)
    size = big.weight.nbytes
    linear = PackedLinear(big) if packed else big
    rows, plain = torch.ones(window, 8192, dtype=dtype, device=device), torch.ones(2**27, dtype=torch.float32, device=device)
    functions = {
        "linear": lambda: linear(rows[:1])[0, 0].item(),
        "window": lambda: linear(rows)[0, 0].item(),
        "read": lambda: plain.sum().item(),
    }
    took = interleaved(functions, repeats)
    return {"weights_mb": n_bytes / 2**20, "step_gb_s": n_bytes / seconds_of_a_step / 1e9, "linear_gb_s": size / took["linear"] / 1e9,
            "read_gb_s": plain.nbytes / took["read"] / 1e9, "linear_window_over_one": took["window"] / took["linear"]}


# ------------------------------------------------------------------------------------------------------ the command


def summary(batch: int, mode: str, timings: list[Timing], base: list[Timing]) -> dict:
    """One row of the table: medians over the rounds, and the spread of the ratio."""
    ratio = ratios(timings, base)
    decode = [(t.tokens - t.prefill_tokens) / (t.seconds - t.prefill) for t in timings if t.seconds > t.prefill]
    peaks = [t.peak_mb for t in timings if t.peak_mb is not None]
    same = [a == b for t, o in zip(timings, base) for a, b in zip(t.ids, o.ids)]
    return {
        "batch": batch, "mode": mode,
        "tokens_per_second": statistics.median(t.tokens / t.seconds for t in timings),
        "decode_tokens_per_second": statistics.median(decode) if decode else None,  # without the prefill
        "seconds": statistics.median(t.seconds for t in timings), "prefill_seconds": statistics.median(t.prefill for t in timings),
        "ratio_to_ar": statistics.median(ratio), "ratio_low": min(ratio), "ratio_high": max(ratio),
        "tokens_per_forward": sum(t.tokens for t in timings) / sum(t.forwards for t in timings),
        "peak_mb": max(peaks, default=None), "identical_to_ar": sum(same) / len(same),
    }  # fmt: skip


def table(result: dict) -> str:
    lines = ["batch  mode          tokens/s   decode only   of AR   lowest..highest   tokens/forward   prefill s   peak MB"]
    for r in result["rows"]:
        spread = f"{r['ratio_low']:.2f}..{r['ratio_high']:.2f}"
        decode = f"{r['decode_tokens_per_second']:.1f}" if r["decode_tokens_per_second"] else "-"
        peak = f"{r['peak_mb']:.0f}" if r["peak_mb"] is not None else "-"
        lines.append(f"{r['batch']:5}  {r['mode']:12}{r['tokens_per_second']:10.1f}{decode:>14}{r['ratio_to_ar']:7.2f}x{spread:>17}"
                     f"{r['tokens_per_forward']:17.2f}{r['prefill_seconds']:12.3f}{peak:>10}")
    W = result["settings"]["window"]
    for batch, of in result["window_over_ar_forward"].items():
        lines.append(f"one step of {W} positions over a step of one, batch {batch}: {of:.2f}"
                     f" (of {2 * W - 1}, the widest: {result['widest_over_ar_forward'][batch]:.2f})")
    at = result["limits"]
    lines.append(f"one token at a time moves {at['step_gb_s']:.1f} GB/s of weights ({at['weights_mb']:.0f} MB a step); "
                 f"one large linear {at['linear_gb_s']:.1f}, plain reading {at['read_gb_s']:.1f}")
    lines.append(f"that linear on {W} rows over one row: {at['linear_window_over_one']:.2f}")
    return "\n".join(lines)


def markdown(result: dict) -> str:
    """The README's table: tokens per second over AR, one line per mode, one column per batch size."""
    rows, batches = result["rows"], list(dict.fromkeys(r["batch"] for r in result["rows"]))
    lines = ["| mode | tokens per forward | " + " | ".join(f"batch {n}" for n in batches) + " |", "|---|---|" + "---|" * len(batches)]
    for mode in dict.fromkeys(r["mode"] for r in rows):
        of = [r for r in rows if r["mode"] == mode]
        cells = " | ".join(f"{r['ratio_to_ar']:.2f}x" + (f" ({r['tokens_per_second']:.0f}/s)" if mode == "ar" else "") for r in of)
        lines.append(f"| {mode} | {of[-1]['tokens_per_forward']:.2f} | {cells} |")
    W = result["settings"]["window"]
    for width, key in ((W, "window_over_ar_forward"), (2 * W - 1, "widest_over_ar_forward")):
        lines.append(f"| a step of {width} over a step of 1 | | " + " | ".join(f"{result[key][str(n)]:.2f}" for n in batches) + " |")
    return "\n".join(lines)


def plot(result: dict, file: Path) -> None:
    """Tokens per second over AR, by batch size, one line per mode."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4))
    names = list(dict.fromkeys(r["mode"] for r in result["rows"]))
    shades = plt.cm.Blues([0.35 + 0.5 * i / max(1, len(names)) for i in range(len(names))])
    colours = {"ar": "#555555", "none": "#b0b0b0", "cursor": "#c0392b", "transformers": "#e08e0b"}
    for name, shade in zip(names, shades):
        rows = [r for r in result["rows"] if r["mode"] == name]
        x = [str(r["batch"]) for r in rows]
        y, width = [r["ratio_to_ar"] for r in rows], 2 if name == "cursor" else 1.2
        ax.plot(x, y, marker="o", color=colours.get(name, shade), label=name, lw=width)
    ax.set(xlabel="batch size", ylabel="tokens per second / AR", ylim=(0, None))
    ax.axhline(1, color="#555555", lw=0.6)
    ax.legend(frameon=False, fontsize=8, ncols=2)
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=150)
    print(f"wrote {file}")


def whole_numbers(parser, option: str, text: str) -> list[int]:
    try:
        values = [int(v) for v in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        parser.error(f"{option} {text}: must be whole numbers of at least 1 with commas between")
    return values


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--prompts", default="arithmetic", metavar="FILE", help="JSONL of chats or question/answer rows (default: arithmetic problems)")
    add("--modes", default=MODES, metavar="LIST", help=f"default {MODES}; ar is always measured")
    add("--peer", default=None, choices=["transformers"], help="also measure its generate()")
    add = parser.add_argument_group("how").add_argument
    add("--batch", default="1,4,8,16", metavar="LIST")
    add("--tau", type=float, default=0.95)
    add("--block-size", type=int, default=None, metavar="B", help="default: as trained")
    add("--window", type=int, default=None, metavar="W", help="candidates per forward (default: B)")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--rounds", type=int, default=5, metavar="N", help="each with other questions while the file has them, after one to warm up")
    add("--pack", default=True, action=argparse.BooleanOptionalAction, help="our float32 modes on a CPU: weights in blocks (model.pack)")
    add("--compile", action="store_true", help="torch.compile the norms and MLPs of our modes (needs a C++ compiler)")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="FILE", help="results file")
    add("--plot", type=Path, default=None, metavar="FILE", help="picture of the ratios (needs matplotlib)")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    batches = whole_numbers(parser, "--batch", args.batch)
    names = list(dict.fromkeys(["ar", *args.modes.split(",")]))
    wrong = [m for m in names if m not in ("ar", "none", "cursor") and not (m.startswith("block") and m[5:].isdigit() and int(m[5:]))]
    if wrong:
        parser.error(f"--modes {','.join(wrong)}: allowed are ar, none, cursor, and block4, block8, ...; transformers is --peer")
    for option in ("rounds", "block_size", "window", "max_new_tokens"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least 1")
    result = run(args, batches, names)
    if args.json:
        print(json.dumps(result))
    return 0


def run(args, batches: list[int], names: list[str]) -> dict:
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(args.model))
    folder = resolve(args.model)
    tokenizer, model = ChatTokenizer.from_pretrained(folder), load_pretrained(folder, dtype, device)
    block_size = args.block_size or tokenizer.mars.get("block_size", 4)
    window = args.window or block_size
    n = max(batches) * (args.rounds + 1)
    if args.prompts == "arithmetic":
        prompts = [p.question for p in arithmetic("test", n)]
    else:
        prompts = [chat[:-1] if chat[-1]["role"] == "assistant" else chat for chat in read_chats(args.prompts, need_answer=False)][:n]
        if len(prompts) < max(batches):
            raise UserError(f"{args.prompts}: {len(prompts)} prompts are fewer than one batch of {max(batches)}")
    print(f"{args.model} on {device}, {str(dtype).removeprefix('torch.')} ({reason}); tau {args.tau:g}, B={block_size}, window {window}, "
          f"{args.rounds} rounds, up to {args.max_new_tokens} tokens each", flush=True)
    n_bytes = weight_bytes(model)
    model = pack(model) if args.pack else model
    packed = any(isinstance(part, PackedLinear) for part in model.modules())
    if args.compile:  # the parts whose shapes stay; attention's grow with every step
        for part in model.modules():
            if isinstance(part, (RMSNorm, MLP)):
                part.compile(dynamic=True)
    settings = dict(block_size=block_size, window=window, max_new_tokens=args.max_new_tokens)
    modes = {}
    for name in names:
        cache = {"ar": "cursor", "none": "none", "cursor": "cursor"}.get(name, "block")
        more = {"cache_block": int(name[5:])} if cache == "block" else {}
        modes[name] = our_mode(model, tokenizer, 1.0 if name == "ar" else args.tau, cache=cache, **settings, **more)
    if args.peer:
        modes["transformers"] = transformers_mode(folder, tokenizer, dtype, device, args.max_new_tokens)
    rows, over, widest = [], {}, {}
    context, widths = 128, sorted({1, window, 2 * window - 1})
    with tqdm(total=len(batches) * (args.rounds + 1) * len(modes), unit="run", disable=args.quiet, leave=False, dynamic_ncols=True) as bar:
        for batch in batches:
            groups = [[prompts[(i * batch + j) % len(prompts)] for j in range(batch)] for i in range(args.rounds + 1)]
            timings = rounds(modes, groups, bar)
            rows += [summary(batch, name, of, timings["ar"]) for name, of in timings.items()]
            seconds = forward_seconds(model, tokenizer, batch, widths, context, repeats=40)
            over[str(batch)], widest[str(batch)] = seconds[window] / seconds[1], seconds[2 * window - 1] / seconds[1]
            if batch == batches[0]:
                one = seconds[1] if batch == 1 else forward_seconds(model, tokenizer, 1, [1], context, 40)[1]
    result = {"rows": rows, "window_over_ar_forward": over, "widest_over_ar_forward": widest,
              "limits": limits(n_bytes, one, dtype, device, window, packed, 10)}
    result["settings"] = settings | {"model": args.model, "tau": args.tau, "rounds": args.rounds, "packed": packed,
                                     "compile": args.compile, "context": context}
    print(table(result))
    if args.out:
        write_results(args.out, result | provenance(device, dtype, args.prompts))
    if args.plot:
        plot(result, args.plot)
    return result


if __name__ == "__main__":
    sys.exit(main())
