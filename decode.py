"""Decoding: a window of masks slides from left to right, and every forward yields one or more tokens.

    prefix  x[0] ... x[n-1]  [M] [M] [M]      one causal forward
                 predicts    n   n+1 ...      x[n-1] predicts token n, mask number m predicts token n+m
    accept  the first candidate always, each next one while its confidence >= tau

tau >= 1 is plain autoregressive decoding, the same loop with a window of one. Three caches, one loop each: `none`
recomputes everything and is the oracle, `block` is the paper's, `cursor` lets every row run at its own pace.

    python decode.py --tau 0.9                                   a sample problem, then yours, for the newest model
    python decode.py --model DIR --prompt "..." --compare        and show the speed-up over one token at a time
"""

import argparse
import codecs
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from data import ChatTokenizer
from kvcache import KVCache
from model import UserError, is_out_of_memory, is_tiny, load_pretrained, pack, pick_device, pick_dtype, resolve

SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
MEASURES = ("probability", "entropy", "margin")
CACHES = ("cursor", "block", "none")
SAMPLE = ("Ada has 62 cards. Ada hands out 20 cards to the children on the beach. Will counts 26 cookies at school. "
          "Then Ada doubles the number of cards. How many cards does Ada have in the end?")


@dataclass
class Generation:
    """What one prompt became. sum(accepted) == len(ids); ids include the EOS that ended it, if one did."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    n_forward: int = 0                                  # every forward while the row was alive: prefill and commits too
    accepted: list[int] = field(default_factory=list)   # tokens taken by each forward that took any
    stop_reason: str = ""                               # "eos" | "stop" | "length" (max_new_tokens) | "context" (the model's positions)


class Rules(NamedTuple):
    """What is fixed for a batch: which ids are never emitted, which end a row, how tokens are chosen and how confidence is measured."""

    mask_id: int
    never: torch.Tensor     # (F,) ids that are never emitted: [MASK] and the padding rows of the embedding; on the device
    eos_ids: torch.Tensor   # (E,) on the CPU
    measure: str            # one of MEASURES
    temperature: float = 0  # 0 = the likeliest token
    top_p: float = 1        # sample from the likeliest tokens that together have this much probability

    @classmethod
    def of(cls, tokenizer, vocab_size: int, measure: str = "probability", device=None, temperature=0.0, top_p=1.0) -> "Rules":
        never = torch.tensor([tokenizer.mask_id, *range(tokenizer.n_tokens, vocab_size)], device=device)
        return cls(tokenizer.mask_id, never, torch.tensor(tokenizer.eos_ids), measure, temperature, top_p)


class Ask(NamedTuple):
    """What the rows want of one forward. All on the CPU."""

    tau: torch.Tensor               # (N,) float32
    limit: torch.Tensor             # (N,) tokens a row may still take; 0 = it is done
    window: int                     # candidates to read
    u: torch.Tensor | None = None   # (N, W) uniform in [0, 1): what a sampled candidate is drawn with


# ------------------------------------------------------------------------------------------ choosing and accepting


def candidates(logits: torch.Tensor, rules: Rules, u=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen ids and their confidence (..., W) from logits (..., W, V), in float32 (paper section 3.3).

    [MASK] and padding rows are removed before the softmax. Chosen is the likeliest, or with a temperature what `draw` says.
    probability: of the chosen token; entropy: in nats, of the whole distribution (low = sure); margin: the chosen token's
    probability minus the best other one's. Temperature and top_p choose, but confidence is measured without them.
    """
    logits = logits.float().index_fill(-1, rules.never, -torch.inf)
    top, ids = logits.max(-1)
    if rules.temperature > 0:
        ids = draw(logits, u.to(logits.device), rules.temperature, rules.top_p)
    if rules.measure == "probability":
        chosen = logits.gather(-1, ids[..., None]).squeeze(-1)
        return ids, (chosen - top).exp() / (logits - top[..., None]).exp().sum(-1)
    p = logits.softmax(-1)
    if rules.measure == "entropy":
        return ids, torch.special.entr(p).sum(-1)
    others = p.scatter(-1, ids[..., None], 0).amax(-1)
    return ids, p.gather(-1, ids[..., None]).squeeze(-1) - others


def draw(logits: torch.Tensor, u: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Sampled ids (..., W) from logits (..., W, V): u (..., W) picks from the cumulated probabilities, likeliest token first.

    Each place of an answer has one u, which is used again when its candidate was thrown away and is drawn anew: a fresh one
    would give sure tokens, which are thrown away less often, more than their share.
    """
    p, order = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)                                     # the likeliest always stays
    total = p.cumsum(-1)
    at = torch.searchsorted(total, u[..., None] * total[..., -1:], right=True)
    return order.gather(-1, at).squeeze(-1)


def accept_prefix(ids, confidence, tau, limit, eos_ids, measure: str = "probability") -> torch.Tensor:
    """How many candidates each row takes, (N,) int64: a prefix, never with a gap (paper section 3.3).

    ids, confidence (N, W); tau (N,); limit (N,) tokens the row may still take (0 = done); eos_ids (E,).
    The first is taken always, the next while confidence >= tau (entropy: <= tau), nothing after an EOS.
    tau >= 1 (entropy: 0) is one token by rule, whatever rounding makes of the confidence. NaN never passes.
    """
    tau = tau[:, None]
    passed = (confidence <= tau if measure == "entropy" else confidence >= tau) & ~one_token(tau, measure)
    passed[:, 0] = True
    n = passed.long().cumprod(1).sum(1)                                                 # length of the passing prefix
    is_eos = (ids[..., None] == eos_ids).any(-1)                                        # (N, W)
    up_to_eos = torch.where(is_eos.any(1), is_eos.long().argmax(1) + 1, ids.shape[1])
    return torch.minimum(torch.minimum(n, up_to_eos), limit)


def one_token(tau, measure: str):
    """Whether tau (a number or a tensor of them) asks for one token per forward, by rule and not by comparing."""
    return tau <= 0 if measure == "entropy" else tau >= 1


def choose(model, hidden, ask: Ask, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (N, W, D) of the window -> candidate ids (N, W) and how many are taken (N,), both on the CPU."""
    ids, confidence = candidates(model.logits(hidden), rules, ask.u)
    both = torch.stack([ids.int(), confidence.view(torch.int32)]).cpu()                 # the step's one wait for the device
    ids, confidence = both[0].long(), both[1].view(torch.float32)
    bad = ~confidence.isfinite().all(1) & (ask.limit > 0)
    if bad.any():
        raise UserError(f"prompt {int(bad.nonzero()[0])}: the logits are not finite; use --dtype float32, or check the weights")
    return ids, accept_prefix(ids, confidence, ask.tau, ask.limit, rules.eos_ids, rules.measure)


def pick(hidden: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """hidden (N, T, D), columns (N, W) on the CPU -> (N, W, D)."""
    return hidden.gather(1, columns.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1]))


def padded(sequences: list[list[int]], fill: int, extra: int = 0) -> torch.Tensor:
    """(N, longest + extra) int64 on the CPU, filled on the right."""
    out = torch.full((len(sequences), max(map(len, sequences)) + extra), fill)
    for i, s in enumerate(sequences):
        out[i, : len(s)] = torch.tensor(s)
    return out


# ------------------------------------------------------------------------------------------- the rows being decoded


class Batch:
    """Host-side record of the rows: what each has produced and may still take, and tau before each forward."""

    def __init__(self, model, tokenizer, n_rows: int, tau, window: int, max_new_tokens: int, rules: Rules, stop=(), on_text=None):
        self.tokenizer, self.tau, self.window, self.rules, self.stop, self.on_text = tokenizer, tau, window, rules, stop, on_text
        self.context, self.max_new_tokens = model.config.max_position_embeddings, max_new_tokens
        self.device = model.lm_head.weight.device
        self.prompts: list[list[int]] = [[]] * n_rows
        self.generations = [Generation() for _ in range(n_rows)]
        self.streams = [StreamDecoder(tokenizer)] * n_rows
        self.at_limit = [""] * n_rows
        self.limit = torch.zeros(n_rows, dtype=torch.long)       # tokens a row may still take; 0 = it is done
        self.n_taken, self.n_forward = torch.zeros_like(self.limit), torch.zeros_like(self.limit)
        self.noise = torch.zeros(n_rows, max_new_tokens + window) if rules.temperature > 0 else None

    def start(self, i: int, prompt, seed: int = 0) -> None:
        """Row i begins to answer a prompt. Raises UserError for one that leaves no position free."""
        self.prompts[i] = self.tokenizer.encode_prompt(prompt)
        room = self.context - len(self.prompts[i])
        if room < 1:
            raise UserError(f"prompt {i} has {len(self.prompts[i])} tokens; the model has {self.context} positions, and one must stay free")
        self.limit[i], self.n_taken[i], self.n_forward[i] = min(self.max_new_tokens, room), 0, 0
        self.at_limit[i] = "length" if self.max_new_tokens <= room else "context"
        self.generations[i], self.streams[i] = Generation(), StreamDecoder(self.tokenizer, self.stop)
        if self.noise is not None:  # the row's own numbers, one for every token it may take
            self.noise[i] = torch.rand(self.noise.shape[1], generator=torch.Generator().manual_seed(seed))

    def alive(self) -> bool:
        return bool((self.limit > 0).any())

    def ask(self, rows=slice(None)) -> Ask:
        """What these rows want of the coming forward. The window is 1 wide when none of them could take more."""
        tau = self.tau(int(self.n_forward.max())) if callable(self.tau) else self.tau
        tau, limit = as_tau(tau, len(self.prompts), self.rules.measure)[rows], self.limit[rows]
        window = 1 if (one_token(tau, self.rules.measure) | (limit <= 1)).all() else self.window
        u = None if self.noise is None else self.noise[rows].gather(1, self.n_taken[rows, None] + torch.arange(window))
        return Ask(tau, limit, window, u)

    def forwarded(self, rows=slice(None)) -> None:
        """Count one forward for each of these rows that is alive."""
        self.n_forward[rows] += self.limit[rows] > 0

    def take(self, ids: torch.Tensor, n: torch.Tensor) -> None:
        """Record that row i took ids[i, :n[i]]; ids (N, W), n (N,)."""
        self.n_taken += n
        self.limit = self.limit - n
        for i, (row, k, left) in enumerate(zip(ids.tolist(), n.tolist(), self.limit.tolist())):
            if k == 0:
                continue
            g, stream, is_eos = self.generations[i], self.streams[i], row[k - 1] in self.tokenizer.eos_ids
            text = stream.add(row[:k], last=is_eos or left == 0)
            stopped, k = stream.stopped_after is not None, stream.stopped_after or k
            g.ids += row[:k]
            g.accepted.append(k)
            g.text += text
            g.stop_reason = "stop" if stopped else "eos" if is_eos else self.at_limit[i] if left == 0 else ""
            if g.stop_reason:
                self.limit[i], g.n_forward = 0, int(self.n_forward[i])
            if self.on_text:
                self.on_text(i, text, k)


def as_tau(tau, n: int, measure: str) -> torch.Tensor:
    """A float or one per row -> (n,) float32. Raises UserError for NaN, negative or infinite values."""
    values = torch.as_tensor(tau, dtype=torch.float64).flatten()
    if len(values) not in (1, n):
        raise UserError(f"{len(values)} values of tau for {n} prompts")
    wrong = values[~(values.isfinite() & (values >= 0))]
    if len(wrong):
        allowed = "0 (one token) up to ln V (the whole window)" if measure == "entropy" else "0 (the whole window) to 1 (one token)"
        raise UserError(f"tau {wrong[0].item():g} is out of range for {measure}: {allowed}")
    return values.float().expand(n)


# ----------------------------------------------------------------------------------------------------- three loops


def decode_none(model, batch: Batch) -> None:
    """No cache: every step forwards the whole sequence and the window. Slow, and what the other two are checked against."""
    while batch.alive():
        ask = batch.ask()
        sequences = [p + g.ids for p, g in zip(batch.prompts, batch.generations)]
        length = torch.tensor([len(s) for s in sequences])
        input_ids = padded(sequences, batch.rules.mask_id, extra=ask.window - 1)       # causal: what is to the right does no harm
        hidden = model(input_ids.to(batch.device))
        ids, n = choose(model, pick(hidden, length[:, None] - 1 + torch.arange(ask.window)), ask, batch.rules)
        batch.forwarded()
        batch.take(ids, n)


def new_cache(model, batch: Batch, ahead: int) -> KVCache:
    """Room for the longest prompt, what may follow it, and `ahead` masks."""
    length = max(map(len, batch.prompts)) + int(batch.limit.max()) + ahead
    return KVCache(model.config, len(batch.prompts), length, model.lm_head.weight.dtype, batch.device)


def decode_cursor(model, batch: Batch) -> None:
    """Every row at its own cursor: no row waits for another (the paper's future work)."""
    pending, n_pending = padded(batch.prompts, batch.rules.mask_id), torch.tensor([len(p) for p in batch.prompts])
    cache = new_cache(model, batch, 2 * batch.window)
    while batch.alive():
        ids, n = cursor_step(model, cache, pending, n_pending, batch.ask(), batch.rules)
        batch.forwarded()
        batch.take(ids, n)
        pending, n_pending = ids, n


def cursor_step(model, cache: KVCache, pending, n_pending, ask: Ask, rules: Rules):
    """One forward of [tokens no forward has seen yet | masks] from every row's own cursor; the tokens are committed.

    pending (N, P) ids, of which row i has n_pending[i] (N,): the prompt at first, then what the last step accepted, and 0
    for a row that took nothing because it is done. Shorter rows are filled on the right with further masks, read by nobody.
    All on the CPU. Returns candidate ids (N, W) and how many are taken (N,).
    """
    width = int(n_pending.max()) + ask.window - 1
    column = torch.arange(width)
    input_ids = torch.nn.functional.pad(pending, (0, width - pending.shape[1]))        # to width, longer or shorter
    input_ids = torch.where(column < n_pending[:, None], input_ids, rules.mask_id)
    hidden = model(input_ids.to(cache.k.device), cache=cache)                          # (N, width, D)
    cache.advance(n_pending)
    last = (n_pending - 1).clamp(min=0)
    return choose(model, pick(hidden, last[:, None] + torch.arange(ask.window)), ask, rules)


def decode_block(model, batch: Batch, cache_block: int) -> None:
    """The paper's cache (section 3.4): blocks of `cache_block` positions are filled, then committed with one more forward.

    Rows fill a block at different speed and wait for the slowest before the next one begins. Inside a block, with `filled`
    tokens taken and W candidates to read:

        forward       committed prefix | x[0] .. x[filled-1] [M] [M] ... [M]
        predicts          0              1    ..  filled     ...             column f of (kept, block) predicts token f
    """
    N, mask_id = len(batch.prompts), batch.rules.mask_id
    length = torch.tensor([len(p) for p in batch.prompts])
    cache = new_cache(model, batch, cache_block)
    hidden = model(padded(batch.prompts, mask_id).to(batch.device), cache=cache)       # prefill
    kept = pick(hidden, length[:, None] - 1)                                           # (N, 1, D): predicts the block's first token
    cache.advance(length)
    batch.forwarded()
    while batch.alive():
        size = min(cache_block, int(batch.limit.max()))
        block, filled = torch.full((N, size), mask_id), torch.zeros(N, dtype=torch.long)
        while (room := torch.minimum(size - filled, batch.limit)).any():
            ask = batch.ask()._replace(limit=room)
            hidden = torch.cat([kept, model(block.to(batch.device), cache=cache)], 1)  # (N, 1 + size, D)
            columns = filled[:, None] + torch.arange(ask.window)
            ids, n = choose(model, pick(hidden, columns.clamp(max=size)), ask, batch.rules)  # what lies past the block is not taken
            row, j = (torch.arange(ask.window) < n[:, None]).nonzero(as_tuple=True)
            block[row, columns[row, j]] = ids[row, j]
            filled += n
            batch.forwarded()
            batch.take(ids, n)
        if batch.alive():
            hidden = model(block.to(batch.device), cache=cache)                        # commit: the block's keys, now of real tokens
            kept = pick(hidden, (filled - 1).clamp(min=0)[:, None])
            cache.advance(filled)
            batch.forwarded()


@torch.inference_mode()
def generate(
    model,
    tokenizer: ChatTokenizer,
    prompts: list,
    tau: float | list[float] | Callable | None = None,
    block_size: int | None = None,
    max_new_tokens: int = 256,
    cache: str = "cursor",
    cache_block: int = 32,
    measure: str = "probability",
    on_text: Callable | None = None,
    window: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | list[int] = 0,
    stop: list[str] = (),
) -> list[Generation]:
    """Answer every prompt in one batch, greedily unless a temperature is given. One Generation per prompt, in order.

    prompts: str (one user turn) or message lists. tau: a float, one per prompt, or a function tau(n_forward) of the forwards
    done so far, called before each forward that takes tokens and returning either; None = one token per forward.
    window: candidates per forward; block_size is its default (which is what the checkpoint was trained with, else 4). A window of
    block_size + 1 is trained too, more is not.
    cache: "cursor" | "block" (blocks of cache_block positions) | "none". measure: of confidence, "probability" | "entropy" |
    "margin". on_text(row, text, n_tokens) is called after each forward of a row with the whole characters it added.
    temperature > 0 samples, from the likeliest tokens that make up top_p; seed, or one per prompt, then fixes each text whatever
    its batch (with one seed for all, equal prompts get equal texts).
    stop: strings that end a row. Its text ends before the first of them, its ids with the token that completed it: just as
    when tokens come one at a time. Exact: in float32 the ids of a row depend neither on the cache (block: at tau 1) nor on
    the other rows, unless two choices, or a confidence and tau, are closer than rounding. Raises UserError for values out of range.
    """
    tau = tau if tau is not None else 0.0 if measure == "entropy" else 1.0
    block_size = block_size if block_size is not None else tokenizer.mars.get("block_size", 4)
    window = window if window is not None else block_size
    for name, value in (("block_size", block_size), ("window", window), ("max_new_tokens", max_new_tokens), ("cache_block", cache_block)):
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    if not (0 <= temperature < math.inf and 0 < top_p <= 1):
        raise UserError(f"temperature {temperature}, top_p {top_p}: allowed are temperature 0 (greedy) or more, top_p above 0 to 1")
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise UserError(f"{len(seeds)} seeds for {len(prompts)} prompts")
    stop = stop or ()
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise UserError(f"stop {stop!r}: must be a list of non-empty strings")
    for name, value, allowed in (("cache", cache, CACHES), ("measure", measure, MEASURES)):
        if value not in allowed:
            raise UserError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    if isinstance(prompts, str):
        raise UserError(f"prompts must be a list, not the text {prompts[:40]!r}")
    if not prompts:
        return []
    if not callable(tau):
        as_tau(tau, len(prompts), measure)
    rules = Rules.of(tokenizer, model.config.vocab_size, measure, model.lm_head.weight.device, temperature, top_p)
    batch = Batch(model, tokenizer, len(prompts), tau, window, max_new_tokens, rules, stop, on_text)
    for i, (prompt, row_seed) in enumerate(zip(prompts, seeds)):
        batch.start(i, prompt, row_seed)
    if cache == "block":
        decode_block(model, batch, cache_block)
    else:
        {"none": decode_none, "cursor": decode_cursor}[cache](model, batch)
    return batch.generations


class StreamDecoder:
    """Token ids in, text out as soon as its characters are whole; the chunks join to tokenizer.decode of all ids.

    With stop strings the text ends before the first one that appears, and what may be the beginning of one is held back.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop=()):
        self.tokenizer, self.stop = tokenizer, stop
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""
        self.stopped_after: int | None = None  # once a stop string has appeared: how many of the last ids it took

    def add(self, ids: list[int], last: bool = False) -> str:
        """Text completed by ids; with last, what was held back comes out too, and half a character as U+FFFD."""
        for n, token_id in enumerate(ids, start=1):
            self.held += self.utf8.decode(self.tokenizer.token_bytes(token_id))
            found = [at for s in self.stop if (at := self.held.find(s)) >= 0]
            if found:
                self.stopped_after = n
                return self.held[: min(found)]
        if last:
            self.held += self.utf8.decode(b"", final=True)
        n_held = 0 if last else max((n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        text, self.held = self.held[: len(self.held) - n_held], self.held[len(self.held) - n_held :]
        return text


# ------------------------------------------------------------------------------------------------------ the command


def shade(parts, colour: bool | None = None, first: int = 0) -> str:
    """Text with each forward's tokens shaded together, darker for more. parts: (text, n_tokens) of each forward.

    Neighbours differ a little, so that two forwards of equal size can be told apart; first is the number of the first part.
    Without colour (default: when stdout is no terminal, or NO_COLOR is set) a forward of 3 tokens looks [like this]₃.
    """
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ if colour is None else colour
    blues = ((None, None, 153, 111, 69, 27), (None, None, 159, 117, 63, 21))  # 256-colour backgrounds, light to dark

    def one(i, text, n):
        if n == 1 or not text:
            return text
        if not colour:
            return f"[{text}]{str(n).translate(SUBSCRIPT)}"
        ink, paper = (15, blues[i % 2][min(n, 5)]) if n >= 4 else (16, blues[i % 2][n])
        return "\n".join(f"\033[38;5;{ink};48;5;{paper}m{line}\033[0m" if line else "" for line in text.split("\n"))

    return "".join(one(i, text, n) for i, (text, n) in enumerate(parts, start=first))


def newest_model() -> tuple[Path, str]:
    """The newest finished checkpoint under out/, else the shipped one; and which of the two it is."""
    finished = [d for stage in ("mars", "sft") for d in Path("out").glob(f"*/{stage}") if (d / "config.json").is_file()]
    if finished:
        return max(finished, key=lambda d: (d / "config.json").stat().st_mtime), "the newest under out/"
    shipped = Path(__file__).resolve().parent / "checkpoints" / "tiny-mars"
    if shipped.is_dir():
        return shipped, "the shipped one"
    raise UserError("no model: nothing finished under out/ yet. Train one (python train.py) or name one (--model DIR)")


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("model").add_argument
    add("--model", default=None, metavar="NAME|DIR", help="folder, short name or hub id (default: the newest under out/)")
    add("--device", default="auto", help="auto | cuda | mps | cpu")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="default: bfloat16 where it is fast")
    add("--pack", default=True, action=argparse.BooleanOptionalAction, help="a float32 model on a CPU: weights in blocks, for speed")
    add = parser.add_argument_group("what to say").add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times: one batch. Without it: what is "
        "piped in; else a sample problem, and on a terminal then yours")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add = parser.add_argument_group("how to decode").add_argument
    add("--tau", type=float, default=None, help="threshold; 1 = one token per forward, lower = more (default 0.9; entropy: 0.5 nats)")
    add("--block-size", type=int, default=None, metavar="B", help="candidates per forward, unless --window is given (default: as trained)")
    add("--window", type=int, default=None, metavar="W", help="candidates per forward (default: B; B+1 is trained too)")
    add("--measure", default="probability", choices=MEASURES, help="of confidence (entropy: accept while <= tau nats)")
    add("--cache", default="cursor", choices=CACHES, help="key/value cache: none is the oracle, block the paper's")
    add("--cache-block", type=int, default=32, metavar="N", help="positions per block of --cache block")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 = the likeliest token (default), above: sample")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens of this much probability")
    add("--seed", type=int, default=0, help="of sampling: the same seed gives the same text")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add = parser.add_argument_group("output").add_argument
    add("--compare", action="store_true", help="also decode one token at a time, and show the speed-up")
    add("--plain", action="store_true", help="text only, no shading")
    add("--out", type=Path, default=None, metavar="DIR", help="also write the JSON object to DIR/generations.json")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.tau is None:
        args.tau = 0.5 if args.measure == "entropy" else 0.9
    return args


def rates(generations: list[Generation], seconds: float) -> tuple[dict, str]:
    """Speed over committed tokens, for --json and as the line that is printed."""
    tokens, forwards = sum(len(g.ids) for g in generations), sum(g.n_forward for g in generations)
    result = {"tokens_per_forward": tokens / forwards, "tokens_per_second": tokens / seconds, "seconds": seconds}
    line = "{tokens_per_forward:.2f} tokens/forward, {tokens_per_second:.1f} tokens/s".format(**result)
    return result, f"{tokens} tokens, {forwards} forwards, {line}, stop: {', '.join(dict.fromkeys(g.stop_reason for g in generations))}"


def answer(model, tokenizer, prompts: list[str], args) -> dict:
    """Decode, print, and return the JSON object of the command."""
    names = ("block_size", "window", "max_new_tokens", "cache", "cache_block", "measure", "temperature", "top_p", "seed", "stop")
    settings = {k: getattr(args, k) for k in names}
    live = len(prompts) == 1
    show = (lambda parts, first=0: "".join(t for t, _ in parts)) if args.plain else shade
    parts: list[list] = [[] for _ in prompts]

    def on_text(row, text, n):
        parts[row].append((text, n))
        if live:
            print(show([(text, n)], first=len(parts[row])), end="", flush=True)

    def timed(**more):
        began = time.perf_counter()
        return generate(model, tokenizer, prompts, **{**settings, **more}), time.perf_counter() - began

    alone = {"tau": None, "cache": "cursor"}  # plain autoregressive decoding, with the cache that suits it best
    generations, seconds = timed(tau=args.tau, on_text=on_text)
    if args.compare:  # both are timed warm and silent: the first forwards of a process are slow, and so is a terminal
        timed(**alone, max_new_tokens=8)
        _, seconds = timed(tau=args.tau)
    for i, prompt in enumerate(prompts) if not live else ():
        print(f"--- {prompt}\n{show(parts[i])}")
    speed, line = rates(generations, seconds)
    print(f"{'' if live else '---'}\n{line}")
    result = {"generations": [vars(g) for g in generations], **speed}
    if args.compare:
        ar, ar_seconds = timed(**alone)
        ar_speed, line = rates(ar, ar_seconds)
        ratio = speed["tokens_per_second"] / ar_speed["tokens_per_second"]
        same = sum(a.ids == b.ids for a, b in zip(ar, generations))
        print(f"one at a time: {line}\nspeed-up {ratio:.2f}x in tokens per second; {same} of {len(prompts)} answers identical")
        result["compare"] = {**ar_speed, "speedup": ratio, "identical": same}
    return result


def main(argv=None) -> int:
    args = parse(argv)
    try:
        where, why = (args.model, "asked for") if args.model else newest_model()
        as_tau(args.tau, 1, args.measure)
        device = pick_device(args.device)
        folder = resolve(where)
        dtype, reason = pick_dtype(device, args.dtype, is_tiny(folder))
        tokenizer = ChatTokenizer.from_pretrained(folder)
        model = load_pretrained(folder, dtype=dtype, device=device)
        model = pack(model) if args.pack else model
        args.block_size = args.block_size if args.block_size is not None else tokenizer.mars.get("block_size", 4)
        if tokenizer.mars.get("stage") != "mars" and not one_token(args.tau, args.measure):
            one = 0 if args.measure == "entropy" else 1
            print(f"note: {where} was not trained with MARS: with more than one token per forward it says noise; try --tau {one}")
        print(f"{where} ({why}) on {device}, {str(dtype).removeprefix('torch.')} ({reason}); "
              f"tau {args.tau:g}, window {args.window or args.block_size}, {args.cache} cache\n", flush=True)
        terminal = sys.stdin is not None and sys.stdin.isatty()
        piped = "" if args.prompt or terminal or sys.stdin is None else sys.stdin.read().strip()
        prompts = args.prompt or [piped or SAMPLE]
        if prompts == [SAMPLE]:
            print(SAMPLE)
        result = answer(model, tokenizer, prompts, args)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "generations.json").write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        if args.json:
            print(json.dumps(result, ensure_ascii=False))
        elif terminal and not args.prompt:
            converse(model, tokenizer, args)
    except (UserError, OSError) as e:  # OSError: --out cannot be written
        print(f"error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        print(f"error: out of memory. Give fewer prompts at once, or lower --max-new-tokens (now {args.max_new_tokens})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def converse(model, tokenizer, args) -> None:
    """Ask for questions until an empty line; each is answered on its own."""
    print("\nYour turn; an empty line ends.")
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            question = ""
        if not question:
            return
        try:
            answer(model, tokenizer, [question], args)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
