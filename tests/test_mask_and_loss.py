"""The block-causal mask, the two-stream batch and the loss."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

import train
from data import Row
from train import IGNORE, Streams, block_starts, build_streams, count_targets, dual_stream_loss, mars_mask

MASK = 3


def row(length: int, *spans, seed=0) -> Row:
    ids = torch.randint(4, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Row(ids[: spans[-1][1]], list(spans))


def sums(model, rows, block_size=4, **kw):
    with torch.no_grad():
        return torch.stack(dual_stream_loss(model, build_streams(rows, block_size, MASK, **kw)))


def full_streams(r: Row, block_size: int, anchor) -> Streams:
    """The authors' layout: a noisy copy of the whole sequence, prompt tokens included, so 2L positions. One-turn rows."""
    [(start, end)], L = r.spans, len(r.ids)
    x, p = torch.tensor(r.ids), torch.arange(len(r.ids))
    anchor = start if anchor is None else anchor
    noisy_ids = torch.where(p >= start, MASK, x)
    starts = torch.cat([torch.full((L,), -1), anchor + (p - anchor) // block_size * block_size])
    labels = torch.full((2 * L,), IGNORE)
    labels[start - 1 : end - 1] = x[start:end]
    labels[L + start : L + end - 1] = x[start + 1 : end]
    return Streams(torch.cat([x, noisy_ids])[None], torch.cat([p, p])[None], starts[None], torch.arange(2 * L) >= L, labels[None])


HAND_WRITTEN = """
1.......|........
11......|........
111.....|........
1111....|........
11111...|........
111111..|........
1111111.|........
11111111|........
........|1.......
........|11......
........|111.....
........|1111....
1111....|....1...
1111....|....11..
1111....|....111.
1111....|....1111
"""


def test_mask_equals_the_one_written_by_hand():
    """Fault: any of the four terms wrong (strictness, block edge, leak from clean to noisy)."""
    p = torch.arange(8)
    positions, noisy = torch.cat([p, p]), torch.arange(16) >= 8
    mask = mars_mask(positions, torch.cat([p * 0, block_starts(p, 0, 4)]), noisy)
    drawn = "\n".join("".join("1" if v else "." for v in line[:8]) + "|" + "".join("1" if v else "." for v in line[8:]) for line in mask)
    print(drawn)
    assert drawn == HAND_WRITTEN.strip()


@pytest.mark.parametrize("anchor, expected", [
    (None, [5, 5, 5, 5, 9, 9, 9, 9, 13]),
    (0, [5, 5, 5, 8, 8, 8, 8, 12, 12]),
    (3, [5, 5, 7, 7, 7, 7, 11, 11, 11]),
])
def test_block_starts(anchor, expected):
    """Fault: a block that begins before its response, or anchors counted from the wrong place."""
    assert block_starts(torch.arange(5, 14), 5, 4, anchor).tolist() == expected


def test_layout_is_the_figure_in_the_method():
    """Fault: labels off by one in either stream; the mask at <|im_end|> supervised; turns mixed up."""
    r = row(14, (3, 8), (11, 14))
    b = build_streams([r], 4, MASK, multiple=1)
    x = r.ids
    assert b.positions[0].tolist() == [*range(14), 3, 4, 5, 6, 7, 11, 12, 13]
    assert b.starts[0, 14:].tolist() == [3, 3, 3, 3, 7, 11, 11, 11]
    assert b.input_ids[0].tolist() == x + [MASK] * 8
    clean = [IGNORE] * 14
    clean[2:7], clean[10:13] = x[3:8], x[11:14]
    assert b.labels[0].tolist() == clean + x[4:8] + [IGNORE] + x[12:14] + [IGNORE]
    assert count_targets([r]) == (6, 8)


def test_random_blocks_begin_anywhere():
    """Fault: an offset that never comes, a block longer than B or before the answer, one draw for the whole batch."""
    rows = [row(30, (6, 14), (18, 30))] * 40
    torch.manual_seed(0)
    starts = build_streams(rows, 4, MASK, "random", multiple=1).starts[:, 30:]
    for answer, begin, end in ((starts[:, :8], 6, 14), (starts[:, 8:], 18, 30)):
        assert {tuple(s.unique().tolist()) for s in answer} == {(begin, *range(begin + first, end, 4)) for first in (1, 2, 3, 4)}


class Oracle:
    """A stub network that answers, at every position, with the token `shift` further on."""

    def __init__(self, ids, shift=1):
        self.ids, self.shift, self.config = ids, shift, tiny_model().config

    def __call__(self, input_ids, positions, mask):
        target = torch.tensor(self.ids + [0, 0])[positions + self.shift]
        return 50.0 * F.one_hot(target, 512).float()

    def token_losses(self, hidden, labels):
        return F.cross_entropy(hidden, labels, reduction="none")


@pytest.mark.parametrize("shift, right", [(1, True), (0, False), (2, False)])
def test_a_network_that_knows_the_next_token_has_no_loss(shift, right):
    """Fault: either stream predicting its own token, or the one after the next."""
    r = row(20, (6, 20))
    mask_loss, ar_loss = dual_stream_loss(Oracle(r.ids, shift), build_streams([r], 4, MASK, multiple=1))
    assert (mask_loss < 1e-6) == right and (ar_loss < 1e-6) == right


@pytest.mark.parametrize("anchor", [None, 0, 3])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
def test_noisy_stream_never_sees_its_own_block(block_size, anchor):
    """Fault: leakage. Changing clean token p moves noisy logits of later blocks only, and never earlier ones."""
    model, r, p = tiny_model(), row(24, (6, 24)), 13
    changed = Row(r.ids[:p] + [r.ids[p] % 500 + 5] + r.ids[p + 1 :], r.spans)
    logits = []
    for each in (r, changed):
        b = build_streams([each], block_size, MASK, anchor, multiple=1)
        with torch.no_grad():
            logits.append(model.logits(model(b.input_ids, b.positions, mars_mask(b.positions, b.starts, b.noisy)))[0, 24:])
    moved = (logits[0] - logits[1]).abs().amax(-1) > 1e-6
    starts = block_starts(torch.arange(6, 24), 6, block_size, anchor)
    assert torch.equal(moved, starts > p)


def test_no_gradient_flows_into_a_blocks_own_clean_tokens():
    """By gradient. Fault: a leak too small to show in a forward."""
    model, r = tiny_model(), row(16, (4, 16))
    b = build_streams([r], 4, MASK, multiple=1)
    embedded = model.model.embed_tokens(b.input_ids).detach().requires_grad_()
    model.model.embed_tokens.forward = lambda _: embedded
    hidden = model(b.input_ids, b.positions, mars_mask(b.positions, b.starts, b.noisy))
    hidden[0, 16 + 4 : 16 + 8].sum().backward()  # the block of positions 8..11
    reached = embedded.grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [True] * 8 + [False] * 8 + [False] * 4 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("anchor", [None, 0])
@pytest.mark.parametrize("start, end", [(6, 24), (7, 8), (7, 11), (7, 12), (5, 10)])
def test_lean_layout_equals_the_authors_two_copies(start, end, anchor, block_size):
    """Logits and gradient of every shared target agree to 1e-5. Fault: what the lean stream leaves out was needed."""
    r, model = row(end, (start, end)), tiny_model().double()  # float64: the claim is about the layout, not about rounding
    lean, full = build_streams([r], block_size, MASK, anchor), full_streams(r, block_size, anchor)
    results = []
    for b in (lean, full):
        model.zero_grad()
        hidden = model(b.input_ids, b.positions, mars_mask(b.positions, b.starts, b.noisy))
        logits = model.logits(hidden[b.labels != IGNORE])
        loss_mask, loss_ar = dual_stream_loss(model, b)
        (loss_mask + loss_ar).backward()
        results.append((logits, loss_mask, loss_ar, *(p.grad.clone() for p in model.parameters())))
    for a, b in zip(*results):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 4, 5])
def test_loss_does_not_depend_on_padding_or_batch_mates(n):
    """Answers of length 1, B-1, B, B+1 after a prompt that is no multiple of B. Fault: padding that is seen or counted."""
    model, r, mate = tiny_model(), row(7 + n, (7, 7 + n)), row(40, (9, 40), seed=1)
    alone = sums(model, [r], multiple=1)
    assert torch.isfinite(alone).all() and (n > 1 or alone[0] == 0)
    assert torch.allclose(alone, sums(model, [r], multiple=64), atol=1e-4)
    assert torch.allclose(alone + sums(model, [mate]), sums(model, [r, mate]), atol=1e-3)


def test_micro_batches_add_up_to_the_whole_batch():
    """With 3 and 30 supervised tokens, each stream alone. Fault: a mean of means."""
    model, rows = tiny_model(), [row(8, (5, 8)), row(40, (10, 40), seed=1)]
    n_mask, n_ar = count_targets(rows)
    gradients = []
    for groups in ([rows], [rows[:1], rows[1:]]):
        for which in (0, 1):
            model.zero_grad()
            for g in groups:
                loss = dual_stream_loss(model, build_streams(g, 4, MASK))
                (loss[which] / (n_mask, n_ar)[which]).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in ((gradients[0], gradients[2]), (gradients[1], gradients[3])):
        assert max((x - y).abs().max() for x, y in zip(a, b)) < 1e-6


def test_chunked_logits_change_nothing():
    """Fault: a chunk lost or counted twice when supervised tokens outnumber one chunk (here of 4)."""
    results = []
    for claimed in (512, 2**23):
        model, b = tiny_model(), build_streams([row(40, (10, 40))], 4, MASK)
        model.config, seen = dataclasses.replace(model.config, vocab_size=claimed), []
        model.lm_head.register_forward_hook(lambda head, given, out, seen=seen: seen.append(len(out)))
        loss = sum(dual_stream_loss(model, b))
        loss.backward()
        results.append((loss.detach(), model.model.embed_tokens.weight.grad))
        assert max(seen) == (59 if claimed == 512 else 4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*results))


def test_sft_is_the_clean_stream_alone():
    """Fault: SFT takes another attention path (causal, no mask) and so another loss or gradient than L_AR."""
    results = []
    for block_size in (None, 4):
        model = tiny_model()
        mask_loss, ar = dual_stream_loss(model, build_streams([row(40, (10, 40)), row(25, (5, 9), (15, 25))], block_size, MASK))
        ar.backward()
        results.append((ar.detach(), model.model.layers[0].mlp.gate_proj.weight.grad))
        assert mask_loss.item() > 0 if block_size else mask_loss.item() == 0
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*results))


def test_bfloat16_autocast_is_near_float32():
    """Fault: a dtype mismatch, or an overflow, on the path that GPUs take."""
    model, b = tiny_model(), build_streams([row(40, (10, 40))], 4, MASK)
    exact = torch.stack(dual_stream_loss(model, b))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = torch.stack(dual_stream_loss(model, b))
    near.sum().backward()
    assert torch.allclose(near, exact, rtol=0.05) and not torch.equal(near, exact)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("length", [1, 7, 127, 129])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that uncompiled FlexAttention is slow
def test_flex_attention_equals_the_dense_mask(length, device):
    """Fault: FlexAttention sees what the dense mask hides, at lengths around its block of 128. On a CPU it has no backward pass."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA")
    ids = torch.randint(5, 500, (length + 3,), generator=torch.Generator().manual_seed(length)).tolist()
    rows = [Row(ids, [(3, length + 3)]), Row(ids[: length // 2 + 4], [(2, length // 2 + 4)])]
    batch = build_streams(rows, 4, MASK, multiple=1).to(device)
    found = []
    for flex in (False, True):
        model = tiny_model("0.5b", num_hidden_layers=2).to(device)
        with torch.set_grad_enabled(device == "cuda"):
            losses = torch.stack(dual_stream_loss(model, batch, flex))
        if device == "cuda":
            losses.sum().backward()
            losses = torch.cat([losses.detach(), *(p.grad.flatten() for p in model.parameters())])
        found.append(losses)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-3 if device == "cuda" else 0)


def test_flex_attention_trains_on_cuda_only(tmp_path, capsys):
    """Fault: a traceback from inside torch."""
    argv = ["--init", "scratch", "--attn", "flex", "--device", "cpu", "--out", str(tmp_path)]
    assert train.main(argv) == 2 and "--attn flex" in capsys.readouterr().err
