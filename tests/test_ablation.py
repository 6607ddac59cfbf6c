"""The Block Diffusion baseline and the ablation table."""

import json
from array import array

import pytest
import torch
from conftest import tiny_model

from data import Row, arithmetic, encode_rows
from eval import ablation, block_diffusion
from train import IGNORE

MASK = 3


def rows_of(*lengths, prompt=5):
    ids = array("i", range(10, 10 + prompt + max(lengths)))
    return [Row(ids[: prompt + n], [(prompt, prompt + n)]) for n in lengths]


def made(*lengths, block_size=4, seed=0):
    return block_diffusion.streams(rows_of(*lengths), block_size, MASK, torch.Generator().manual_seed(seed))


def test_the_mask_of_both_streams():
    """Fault: a leak. By hand, for a prompt of 5 and an answer of 6 with B = 4: blocks 5..8 and 9..10."""
    ids, positions, mask, labels, weights = made(6)
    L = ids.shape[1] // 2
    block = lambda p: None if p < 5 else (p - 5) // 4
    for q in range(11):
        for k in range(11):
            same = block(q) is not None and block(q) == block(k)
            assert mask[0, q, k] == (k <= q or same), (q, k)                     # clean to clean
            assert not mask[0, q, L + k]                                         # clean to noisy
            if q >= 5:
                assert mask[0, L + q, L + k] == same                             # noisy to noisy
                assert mask[0, L + q, k] == (k < 5 or block(k) < block(q))       # noisy to clean
    assert not mask[0, :11, 11:L].any() and not mask[0, L : L + 11, 11:L].any()  # padding is seen by nobody


@pytest.mark.parametrize("seed", range(5))
def test_every_masked_token_is_predicted_once_by_its_neighbour(seed):
    """Fault: the shift is off by one, an unmasked token is learned, or the first token of a block is predicted by a stream that sees it."""
    ids, positions, mask, labels, weights = made(11, 3, seed=seed)
    L = ids.shape[1] // 2
    for i, n in enumerate((11, 3)):
        masked = [p for p in range(5, 5 + n) if ids[i, L + p] == MASK]
        learned = {}
        for column in (labels[i] != IGNORE).nonzero().flatten().tolist():
            p = column % L
            assert labels[i, column] == ids[i, p + 1] and not mask[i, column, p + 1]          # the clean token it should say
            assert column >= L or (p + 1 - 5) % 4 == 0                                        # clean: only the first of a block
            assert column < L or ids[i, column + 1] == MASK
            learned[p + 1] = learned.get(p + 1, 0) + 1
        assert learned == {p: 1 for p in masked}
    assert (weights[0] == weights[0, 0]).all() and (weights >= 1).all()


def test_no_noisy_position_depends_on_what_it_predicts():
    """Fault: a leak through two layers. Change the clean token a mask should say: the logits there stay."""
    model, (ids, positions, mask, labels, _) = tiny_model().double(), made(9, seed=3)
    L = ids.shape[1] // 2
    with torch.no_grad():
        before = model(ids, positions, mask)
        for column in (labels[0] != IGNORE).nonzero().flatten().tolist():
            other = ids.clone()
            other[0, column % L + 1] += 1
            assert torch.equal(model(other, positions, mask)[0, column], before[0, column])


@pytest.mark.parametrize("seed", range(3))
def test_decoding_is_what_training_saw(seed):
    """Fault: another mask or another position in the decoder. Its last block with the same places open must give the hidden states
    that training had, clean and noisy, in a batch with a shorter row; an answer of 6 is filled to 8."""
    model, rows = tiny_model().double(), [block_diffusion.fill(r, 4) for r in rows_of(6, 2)]
    assert [len(r.ids) for r in rows] == [13, 9] and rows[0].ids[-1] == rows[0].ids[10] and rows[0].spans == [(5, 13)]
    ids, positions, mask, labels, _ = block_diffusion.streams(rows, 4, MASK, torch.Generator().manual_seed(seed))
    L = ids.shape[1] // 2
    again, ends = torch.zeros(2, 13, dtype=torch.long), torch.tensor([[9], [5]])
    for i, end in enumerate(ends.flatten().tolist()):
        again[i, :end], again[i, end : end + 4] = ids[i, :end], ids[i, L + end : L + end + 4]
    with torch.no_grad():
        trained = model(ids, positions, mask)
        found = block_diffusion.open_block(model, again, torch.tensor([[5], [5]]), ends, 4)
    for i, end in enumerate(ends.flatten().tolist()):
        assert torch.allclose(found[i, 0], trained[i, end - 1]) and torch.allclose(found[i, 1:], trained[i, L + end : L + end + 3])


def test_rows_do_not_disturb_each_other(tokenizer):
    """Fault: padding, a finished row or unequal prompts change an answer."""
    model, prompts = tiny_model(), ["Hi", "one two three four five", "a b"]
    together = block_diffusion.generate(model, tokenizer, prompts, 4, 10)
    alone = [block_diffusion.generate(model, tokenizer, [p], 4, 10)[0] for p in prompts]
    assert [(g.ids, g.n_forward) for g in together] == [(g.ids, g.n_forward) for g in alone] and all(len(g.ids) == 10 for g in alone)


def test_it_learns(tokenizer):
    """Fault: gradients that do not reach the masks."""
    rows, _ = encode_rows([p.messages() for p in arithmetic("train", 16)], tokenizer, 256)
    losses = block_diffusion.train(tiny_model(), tokenizer, rows, 4, 12, 16, 3e-3, 0, quiet=True)
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def test_the_table_and_going_on(tmp_path, capsys, monkeypatch):
    """Fault: a variant trained from another start, a mean over the wrong runs, finished work done again."""
    argv = ["--seeds", "0,1", "--blocks", "4,8", "--problems", "1", "--sft-steps", "2", "--steps", "2", "--quiet", "--json",
            "--work", str(tmp_path / "work"), "--out", str(tmp_path / "a.json")]
    grades, real, bases = iter(range(99)), ablation.block_diffusion.run, []
    monkeypatch.setattr(ablation.block_diffusion, "run", lambda base, *more: bases.append(base) or real(base, *more))
    with monkeypatch.context() as m:
        m.setattr(ablation, "score", lambda *of: {"accuracy": next(grades) / 100, "tokens_per_forward": 1.0})  # 0..6, then 7..13
        assert ablation.main(argv) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(r["name"], r["block_size"]) for r in rows] == [
        ("AR SFT", None), ("AR SFT, as many further steps", None), ("MARS B=4 without SFT loss", 4), ("MARS B=4", 4),
        ("MARS B=8 without SFT loss", 8), ("MARS B=8", 8), ("Block Diffusion B=4", 4)]
    assert [r["accuracy"] for r in rows] == pytest.approx([(2 * i + 7) / 200 for i in range(7)])
    starts = [tmp_path / "work" / f"seed{seed}" / "base" / "sft" for seed in (0, 1)]
    assert bases == starts
    for start in starts:
        for i in range(1, 6):
            about = json.loads((start.parent.parent / f"{i:02d}" / "log.jsonl").read_text().splitlines()[0])
            assert about["settings"]["init"] == str(start) and about["settings"]["anchor"] == "random"
    scores = ablation.score(tmp_path / "work" / "seed1" / "05" / "mars", "MARS B=8", 8, arithmetic("test", 1))
    assert set(scores) == {"accuracy", "tokens_per_forward", "accuracy_at_tau0.95"}
    config = json.loads((tmp_path / "work" / "seed1" / "05" / "mars" / "config.json").read_text())
    assert config["mars"]["block_size"] == 8
    log = (tmp_path / "work" / "seed1" / "04" / "log.jsonl").read_text().splitlines()
    assert json.loads(log[0])["settings"]["ar_weight"] == 0 and json.loads(log[0])["settings"]["seed"] == 1
    assert ablation.main([*argv, "--problems", "2"]) == 2 and "other settings" in capsys.readouterr().err
    monkeypatch.setattr(ablation.train, "optimizer_step", None)
    monkeypatch.setattr(ablation, "score", None)
    assert ablation.main(argv) == 0
    runs = {"x": [{"accuracy": 0.5, "tokens_per_forward": 1.0, "accuracy_at_tau0.95": 0.25}, {"accuracy": 0.7, "tokens_per_forward": 2.0,
            "accuracy_at_tau0.95": 0.75}]}
    [row] = ablation.summary(runs, {"x": 4})
    assert (row["accuracy"], row["tokens_per_forward"], row["accuracy_at_tau0.95"]) == pytest.approx((0.6, 1.5, 0.5))
    assert row["accuracy_sd"] == pytest.approx(0.1414, abs=1e-3) and "60.0 ± 14.1 %" in ablation.markdown({"rows": [row]})
