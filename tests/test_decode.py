"""The window, acceptance, the three caches and what is counted."""

import copy

import pytest
import torch
from conftest import tiny_model

from decode import Rules, StreamDecoder, accept_prefix, candidates, draw, generate, shade
from model import UserError

PROMPTS = [
    "Hi",
    "Ada has 3 coins. How many?",
    "Ben has 12 books. Ben buys 7 more books at school. Then Ben doubles the number of books. How many books does Ben have now?",
    "Cleo counts 5 shells.",
    " ".join(f"{n} coins." for n in range(40)),
]
N = 24


def quiet(tokenizer):
    """The same tokenizer with an EOS that a random model never says by chance: rows run to max_new_tokens."""
    t = copy.copy(tokenizer)
    t.eos_ids = [511]
    return t


def plain_greedy(model, tokenizer, prompt, n):
    """Independent of decode.py: whole forward, argmax of what may be emitted, append, stop at EOS."""
    ids = tokenizer.encode_prompt(prompt)
    start = len(ids)
    while len(ids) - start < n:
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([ids])))[0, -1]
        logits[tokenizer.mask_id] = -1e30
        ids.append(int(logits[: tokenizer.n_tokens].argmax()))
        if ids[-1] in tokenizer.eos_ids:
            break
    return ids[start:]


def run(model, tokenizer, prompts=PROMPTS, tau=1.0, **kw):
    return generate(model, tokenizer, prompts, tau, **{"block_size": 4, "max_new_tokens": N, **kw})


def sharpen(model, factor=6):
    """More decided: a flat model accepts one token everywhere, and then nothing is tested."""
    model.logits = lambda h, real=model.logits: real(h) * factor
    return model


def ids(generations):
    return [g.ids for g in generations]


# ------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
@pytest.mark.parametrize("tau", [1.0, 1.5])
def test_tau_one_is_plain_greedy_decoding(model, tokenizer, cache, tau):
    """Fault: the one-token mode is not the autoregressive model; a cache that lies."""
    generations = run(model, tokenizer, tau=tau, cache=cache, cache_block=5)
    for prompt, g in zip(PROMPTS, generations):
        assert g.ids == plain_greedy(model, tokenizer, prompt, N)
        assert g.accepted == [1] * len(g.ids)


@pytest.mark.parametrize("measure, tau", [
    *(("probability", t) for t in (0.95, 0.7, 0.3, 0.0)), ("entropy", 0.7), ("entropy", 1.5), ("margin", 0.3),
])
def test_cursor_equals_the_oracle(model, tokenizer, measure, tau):
    """Fault: keys of masks read later, wrong positions after uneven acceptance, rows mixed up. ids and acceptance both agree."""
    t, model = quiet(tokenizer), sharpen(model)
    oracle, cursor = (run(model, t, tau=tau, cache=c, measure=measure) for c in ("none", "cursor"))
    assert ids(cursor) == ids(oracle)
    assert [g.accepted for g in cursor] == [g.accepted for g in oracle]
    assert len({k for g in oracle for k in g.accepted}) > 1 or tau == 0, "acceptance too even to show anything"


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_any_block_size(model, tokenizer, block_size):
    """Fault: sizes other than 4 hard-wired; B = 1 is autoregressive at every tau."""
    t = quiet(sharpen(model) and tokenizer)
    cursor = run(model, t, tau=0.2, block_size=block_size)
    assert ids(cursor) == ids(run(model, t, tau=0.2, block_size=block_size, cache="none"))
    assert max(k for g in cursor for k in g.accepted) == block_size
    if block_size == 1:
        assert ids(run(model, t, tau=0.0, block_size=1)) == ids(run(model, t, tau=1.0))


def test_block_cache_with_one_big_block_equals_the_oracle(model, tokenizer):
    """Fault: the block loop's kept logits or fill order differ from the sliding window where no block edge interferes."""
    t = quiet(tokenizer)
    sharpen(model)
    block, oracle = run(model, t, tau=0.3, cache="block", cache_block=N), run(model, t, tau=0.3, cache="none")
    assert ids(block) == ids(oracle) and [g.accepted for g in block] == [g.accepted for g in oracle]


def test_block_cache_stops_at_block_ends(model, tokenizer):
    """Fault: a window that runs over its block, whose keys are not computed yet."""
    for g in run(model, quiet(tokenizer), tau=0.0, cache="block", cache_block=6):
        assert g.accepted == [4, 2] * 4


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
def test_a_row_does_not_depend_on_its_batch(model, tokenizer, cache):
    """Fault: padding, order or a finished neighbour changes a row. Rows end at different times, by EOS."""
    sharpen(model)
    t = quiet(tokenizer)
    free = run(model, t, tau=0.3, cache=cache)
    t.eos_ids = [511, free[0].ids[5], free[2].ids[11], free[4].ids[17]]
    solo = [run(model, t, [p], tau=0.3, cache=cache)[0] for p in PROMPTS]
    assert len({len(g.ids) for g in solo}) >= 3
    order = [4, 2, 0, 3, 1]
    together = run(model, t, [PROMPTS[i] for i in order], tau=0.3, cache=cache)
    key = lambda g: (g.ids, g.accepted, g.stop_reason)
    assert [key(g) for g in together] == [key(solo[i]) for i in order]


def test_rows_of_one_batch_have_their_own_tau(model, tokenizer):
    """Fault: tau of one row applied to another, or the window closed for all because one row asks for one token."""
    t = quiet(tokenizer)
    taus, model = [1.0, 0.3, 0.0, 0.95, 0.5], sharpen(model)
    assert [g.accepted for g in run(model, t, tau=taus)] == [run(model, t, [p], tau=x)[0].accepted for p, x in zip(PROMPTS, taus)]


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
def test_tau_may_change_while_decoding(model, tokenizer, cache):
    """Fault: tau read once, or the window's width frozen at the first forward."""
    seen = []

    def tau(n_forward):
        seen.append(n_forward)
        return 1.0 if n_forward < 4 else 0.0

    [g] = run(model, quiet(tokenizer), ["Hi"], tau=tau, cache=cache)
    assert seen == sorted(seen) and seen[0] == (1 if cache == "block" else 0)  # block: after the prefill, which takes nothing
    assert g.accepted[:3] == [1, 1, 1] and set(g.accepted[4:-1]) == {4}


# ---------------------------------------------------------------------------------------------- acceptance, by hand


def accept(confidence, tau, ids=None, limit=9, measure="probability", eos=(99,)):
    confidence = torch.tensor([confidence])
    ids = torch.tensor([ids or list(range(confidence.shape[1]))])
    return accept_prefix(ids, confidence, torch.tensor([float(tau)]), torch.tensor([limit]), torch.tensor(eos), measure).item()


@pytest.mark.parametrize("confidence, tau, n", [
    ([0.1, 0.9, 0.9, 0.9], 0.9, 4),     # the first is always taken, = passes
    ([0.9, 0.9, 0.5, 0.9], 0.9, 2),     # a prefix, never a gap
    ([0.9, 0.1, 0.9, 0.9], 0.9, 1),
    ([0.1, 0.1, 0.1, 0.1], 0.0, 4),
    ([1.0, 1.0, 1.0, 1.0], 1.0, 1),     # saturated, and still one token
    ([1.0, 1.0, 1.0, 1.0], 1.5, 1),
    ([0.9, float("nan"), 0.9, 0.9], 0.0, 1),  # NaN never passes
    ([float("nan")] * 4, 0.5, 1),
])
def test_accept_prefix(confidence, tau, n):
    """Faults named beside each case."""
    assert accept(confidence, tau) == n


def test_accept_prefix_by_other_measures():
    """Fault: the comparison not turned round for entropy; entropy 0 (surely one token) taking several."""
    assert accept([3.0, 0.1, 0.2, 0.9], 0.2, measure="entropy") == 3
    assert accept([0.0, 0.0, 0.0, 0.0], 0.0, measure="entropy") == 1
    assert accept([0.0, 0.8, 0.7, 0.8], 0.75, measure="margin") == 2
    assert accept([1.0, 1.0], 1.0, measure="margin") == 1


@pytest.mark.parametrize("at", range(4))
def test_nothing_is_accepted_behind_an_eos(at):
    """Fault: tokens behind EOS kept or counted."""
    row = [5, 6, 7, 8]
    row[at] = 99
    assert accept([1.0] * 4, 0.0, ids=row) == at + 1
    assert accept([1.0] * 4, 0.0, ids=row, limit=1) == 1 and accept([1.0] * 4, 0.0, ids=row, limit=0) == 0


@pytest.mark.parametrize("measure", ["probability", "entropy", "margin"])
def test_confidence_is_measured_without_mask_and_padding(measure):
    """Fault: [MASK] removed before argmax only, so that its probability still lowers the confidence."""
    logits = torch.tensor([[[2.0, 1.0, 9.0, 0.5, 8.0, 7.0]]])
    rules = Rules(2, torch.tensor([2, 4, 5]), torch.tensor([0]), measure)
    chosen, confidence = candidates(logits, rules)
    p = torch.tensor([2.0, 1.0, 0.5]).softmax(0)
    expected = {"probability": p[0], "entropy": -(p * p.log()).sum(), "margin": p[0] - p[1]}[measure]
    assert chosen.item() == 0 and torch.allclose(confidence.squeeze(), expected)
    assert logits[0, 0, 2] == 9  # a pure function


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
def test_mask_and_padding_rows_are_never_emitted(tokenizer, cache):
    """End to end, on a model with spare rows that wants to say nothing else."""
    model = tiny_model(vocab_size=520)
    said = model.logits
    model.logits = lambda h: said(h).index_add(-1, torch.tensor([tokenizer.mask_id, 515]), torch.full((*h.shape[:-1], 2), 1e3))
    for g in run(model, tokenizer, tau=0.5, cache=cache):
        assert tokenizer.mask_id not in g.ids and max(g.ids) < tokenizer.n_tokens


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
def test_a_flat_model_never_loops_and_takes_the_window_at_zero(tokenizer, cache):
    """Fault: no progress when nothing is confident; tau 0 taking fewer than B."""
    model = tiny_model()
    model.logits = lambda h, real=model.logits: real(h) * 0
    t = quiet(tokenizer)
    [one] = run(model, t, ["Hi"], tau=0.5, cache=cache, cache_block=8)
    [all_] = run(model, t, ["Hi"], tau=0.0, cache=cache, cache_block=8)
    assert one.accepted == [1] * N and all_.accepted == [4] * (N // 4)


def test_saturated_bfloat16_still_takes_one_token_at_tau_one(tokenizer):
    """Fault: softmax rounds to 1.0 and 1.0 >= 1.0 accepts several."""
    model = tiny_model().bfloat16()
    model.logits = lambda h, real=model.logits: real(h) * 1000
    one, open_ = run(model, quiet(tokenizer), ["Hi", "Hi"], tau=[1.0, 0.9999])  # the second keeps the window open
    assert one.accepted == [1] * N and max(open_.accepted) == 4


def test_non_finite_logits_are_an_error(tokenizer, model):
    """Fault: overflow turned into silent garbage."""
    model.logits = lambda h, real=model.logits: real(h) * torch.nan
    with pytest.raises(UserError, match="not finite"):
        run(model, tokenizer)


# ------------------------------------------------------------------------------------------- ends, counters, limits


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
@pytest.mark.parametrize("at", range(6))
def test_output_ends_exactly_at_eos(model, tokenizer, cache, at):
    """Any position in any window. Fault: text, ids, stream or counters go on behind EOS."""
    t = quiet(tokenizer)
    [free] = run(model, t, ["Hi"], tau=0.0, cache=cache)
    t.eos_ids = [free.ids[at], 511]
    end = free.ids.index(free.ids[at]) + 1
    streamed = []
    [g] = run(model, t, ["Hi"], tau=0.0, cache=cache, on_text=lambda row, text, n: streamed.append((text, n)))
    assert g.ids == free.ids[:end] and g.stop_reason == "eos"
    assert g.text == t.decode(g.ids) == "".join(text for text, _ in streamed)
    assert sum(g.accepted) == len(g.ids) == sum(n for _, n in streamed)


def test_forwards_are_counted_while_a_row_is_alive(model, tokenizer):
    """Fault: prefill or commits not counted, or a finished row charged for its neighbours."""
    t = quiet(tokenizer)
    [g] = run(model, t, ["Hi"], tau=0.0, max_new_tokens=10)
    assert g.accepted == [4, 4, 2] and g.n_forward == 3
    [g] = run(model, t, ["Hi"], tau=0.0, max_new_tokens=16, cache="block", cache_block=8)
    assert g.n_forward == 1 + 2 + 1 + 2  # prefill, two inner steps, commit, two inner steps
    t.eos_ids = [run(model, t, ["Hi"], max_new_tokens=3)[0].ids[2]]
    short, long = run(model, t, ["Hi", PROMPTS[2]])
    assert short.n_forward == len(short.ids) < long.n_forward == len(long.ids)


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
@pytest.mark.parametrize("n", [1, 5, 7])
def test_max_new_tokens_is_exact(model, tokenizer, cache, n):
    """Fault: the last window overshoots."""
    for g in run(model, quiet(tokenizer), tau=0.0, max_new_tokens=n, cache=cache, cache_block=4):
        assert len(g.ids) == sum(g.accepted) == n and g.stop_reason == "length"


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
def test_the_models_positions_are_never_passed(tokenizer, cache):
    """Fault: a window behind max_position_embeddings, silently; a prompt that is too long."""
    length = len(tokenizer.encode_prompt(PROMPTS[2]))
    model = tiny_model(max_position_embeddings=length + 6)
    short, long = run(model, quiet(tokenizer), ["Hi", PROMPTS[2]], tau=0.0, cache=cache)
    assert (len(short.ids), short.stop_reason) == (N, "length")
    assert (len(long.ids), long.stop_reason) == (6, "context")
    with pytest.raises(UserError, match=f"prompt 1 has {len(tokenizer.encode_prompt(PROMPTS[4]))} tokens; the model has {length + 6}"):
        run(model, tokenizer, ["Hi", PROMPTS[4]], cache=cache)


@pytest.mark.parametrize("bad", [float("nan"), -1, -0.01, float("inf"), [0.5, -1.0, 0.5, 0.5, 0.5], [0.5], lambda n: -1.0])
def test_tau_out_of_range_is_refused(model, tokenizer, bad):
    """Fault: NaN compares False for ever. (One value in a list of one stands for all rows, so it must be valid.)"""
    if bad == [0.5]:
        assert ids(run(model, tokenizer, tau=bad)) == ids(run(model, tokenizer, tau=0.5))
        return
    with pytest.raises(UserError, match="tau .* out of range"):
        run(model, tokenizer, tau=bad)


@pytest.mark.parametrize("option, value", [
    ("block_size", 0), ("window", 0), ("max_new_tokens", 0), ("cache_block", 0), ("cache", "paged"), ("measure", "luck"),
    ("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("stop", "a string"), ("stop", [""]), ("prompts", "Hi"),
    ("seed", [1, 2]),
])
def test_options_out_of_range_are_named(model, tokenizer, option, value):
    """Fault: a traceback from the middle of torch."""
    with pytest.raises(UserError, match=option):
        run(model, tokenizer, **{option: value})


def test_several_eos_ids(model, tokenizer):
    """Fault: only the first of a list stops."""
    t = quiet(tokenizer)
    [free] = run(model, t, ["Hi"])
    t.eos_ids = [511, free.ids[3]]
    assert run(model, t, ["Hi"])[0].ids == free.ids[: free.ids.index(free.ids[3]) + 1]


# ---------------------------------------------------------------------------------------- sampling, stop strings, windows


def test_draw_follows_the_probabilities():
    """Fault: a token sampled more or less often than its probability; top_p that cuts the likeliest, or too late; temperature
    upside down. 20,000 evenly spaced u, so the shares are exact to 1e-4."""
    logits = torch.tensor([0.1, 0.5, 0.05, 0.35]).log().expand(20_000, 4)
    u = (torch.arange(20_000) + 0.5) / 20_000
    share = lambda *a: (torch.bincount(draw(logits, u, *a), minlength=4) / 20_000).tolist()
    assert share(1.0, 1.0) == pytest.approx([0.1, 0.5, 0.05, 0.35], abs=2e-4)
    assert share(1.0, 0.84) == pytest.approx([0, 0.5 / 0.85, 0, 0.35 / 0.85], abs=2e-4)
    assert share(1.0, 0.3) == [0, 1, 0, 0] == share(0.01, 1.0)
    assert share(0.5, 1.0) == pytest.approx([0.01 / 0.385, 0.25 / 0.385, 0.0025 / 0.385, 0.1225 / 0.385], abs=2e-4)


def test_confidence_of_a_sampled_token_is_its_own():
    """Fault: the likeliest token's confidence given to another one, or confidence tempered along with the choice."""
    logits = torch.tensor([[[0.1, 0.6, 0.3]]]).log()
    last = torch.tensor([[0.999]])
    for measure, expected in (("probability", 0.1), ("margin", 0.1 - 0.6)):
        rules = Rules(0, torch.tensor([], dtype=torch.long), torch.tensor([9]), measure, temperature=5.0)
        chosen, confidence = candidates(logits, rules, last)
        assert chosen.item() == 0 and confidence.item() == pytest.approx(expected)


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
def test_the_seed_fixes_the_text_whatever_the_batch(model, tokenizer, cache):
    """Fault: randomness shared by the rows, or drawn per forward, so that a neighbour or another cache changes a text."""
    t, model = quiet(tokenizer), sharpen(model)
    seeds, kw = [3, 1, 4, 1, 5], dict(tau=0.3, temperature=0.8, top_p=0.9, cache=cache, cache_block=N)
    together = run(model, t, seed=seeds, **kw)
    assert ids(together) == [run(model, t, [p], seed=s, **kw)[0].ids for p, s in zip(PROMPTS, seeds)]
    assert ids(together) == ids(run(model, t, seed=seeds, **{**kw, "cache": "none"}))
    one = [run(model, t, ["Hi"], seed=s, **kw)[0].ids for s in range(4)]
    assert len(set(map(tuple, one))) == 4 and one[0] == run(model, t, ["Hi"], seed=0, **kw)[0].ids


def test_a_rejected_candidate_is_drawn_again_with_the_same_number(tokenizer):
    """Fault: a fresh number after a rejection, which favours sure tokens. A model that says the same everywhere: then windows
    must not change the text at all."""
    model, t = tiny_model(), quiet(tokenizer)
    logits = torch.randn(512, generator=torch.Generator().manual_seed(0)) * 2
    model.logits = lambda h: logits.expand(*h.shape[:-1], 512)
    one, several = (run(model, t, ["Hi"], tau=tau, temperature=1.0, seed=7)[0] for tau in (1.0, 0.02))
    assert several.ids == one.ids and 1 < max(several.accepted) and 1 in several.accepted


def test_the_window_closes_when_nobody_could_take_more(model, tokenizer):
    """Fault: B columns computed and paid for by rows at tau 1, after the only row that used them has ended."""
    t, widths = quiet(tokenizer), []
    model.logits = lambda h, real=model.logits: (widths.append(h.shape[1]), real(h))[1]
    t.eos_ids = [run(model, t, ["Ben"], tau=0.0, max_new_tokens=4)[0].ids[3]]
    widths.clear()
    a, b = run(model, t, ["Hi", "Ben"], tau=[1.0, 0.0], max_new_tokens=6)
    assert b.stop_reason == "eos" and widths == [4] * b.n_forward + [1] * (a.n_forward - b.n_forward) and 1 in widths


def test_cold_sampling_is_greedy(model, tokenizer):
    """Fault: temperature applied the wrong way round, top_p that drops the likeliest token."""
    t = quiet(tokenizer)
    greedy = ids(run(model, t, tau=0.3))
    assert ids(run(model, t, tau=0.3, temperature=1e-4)) == greedy == ids(run(model, t, tau=0.3, temperature=2.0, top_p=1e-6))


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
@pytest.mark.parametrize("tau", [1.0, 0.0])
def test_stop_strings_end_a_row_as_if_tokens_came_one_by_one(model, tokenizer, cache, tau):
    """Fault: a stop string across two forwards missed, or shown in part; text, ids, stream or counters behind it; a later
    match that wins. Every place in the answer where a string of four characters appears first."""
    t = quiet(tokenizer)
    [free] = run(model, t, ["Hi"], tau=tau, cache=cache)
    stops = dict.fromkeys(free.text[at : at + 4] for at in range(0, len(free.text) - 4, 3))
    stops = [s for s in stops if "\ufffd" not in s]  # which half a character may look like, for a while
    assert len(stops) > 3
    for stop in stops:
        first = free.text.find(stop)
        streamed = []
        on_text = lambda row, text, n, streamed=streamed: streamed.append((text, n))
        [g] = run(model, t, ["Hi"], tau=tau, cache=cache, stop=["never", stop], on_text=on_text)
        n = next(n for n in range(1, N + 1) if stop in t.decode(free.ids[:n]))
        assert (g.text, g.ids, g.stop_reason) == (free.text[:first], free.ids[:n], "stop")
        assert "".join(text for text, _ in streamed) == g.text and sum(n for _, n in streamed) == sum(g.accepted) == len(g.ids)
    other, _ = run(model, t, ["Ben", "Hi"], tau=tau, cache=cache, stop=[stop])
    assert ids([other]) == ids(run(model, t, ["Ben"], tau=tau, cache=cache, stop=[stop]))


def test_the_earliest_match_wins_and_a_beginning_is_held_back(tokenizer):
    """Fault: stop strings tried in the order given; half of one already shown when the rest arrives; held text lost at the end."""
    stream = StreamDecoder(tokenizer, ["bcd", "ab"])
    assert stream.add(tokenizer.encode("xabcd")) == "x" and stream.stopped_after == len(tokenizer.encode("xab"))
    stream = StreamDecoder(tokenizer, ["###"])
    assert [stream.add(tokenizer.encode(part)) for part in ("a#", "#b", "##")] == ["a", "##b", ""]
    assert stream.add([], last=True) == "##" and stream.stopped_after is None
    stream = StreamDecoder(tokenizer, ["##"])
    assert [stream.add(tokenizer.encode("b#")), stream.add(tokenizer.encode("#c"))] == ["b", ""] and stream.stopped_after == 1


def test_a_wider_window_reads_one_more_candidate(model, tokenizer):
    """Fault: --window ignored, or block_size (what the checkpoint knows) overwritten by it."""
    t = quiet(tokenizer)
    [g] = run(model, t, ["Hi"], tau=0.0, window=5, max_new_tokens=15)
    assert g.accepted == [5, 5, 5] and g.ids == run(model, t, ["Hi"], tau=0.0, window=5, max_new_tokens=15, cache="none")[0].ids


# --------------------------------------------------------------------------------------------------- text, as it comes


def test_shading_is_readable_without_colour():
    """Fault: the forwards cannot be told apart on paper; text lost by shading."""
    parts = [("Ada", 1), (" has 3", 3), ("", 1), ("\ncoins.", 4)]
    assert shade(parts, colour=False) == "Ada[ has 3]₃[\ncoins.]₄"
    import re

    assert re.sub("\033\\[[0-9;]*m", "", shade(parts, colour=True)) == "Ada has 3\ncoins."
    assert len(set(re.findall("48;5;\\d+", shade([(c, n) for n, c in enumerate("abcde", 1)], colour=True)))) == 4
