"""Held-out losses and calibration; a model's own answers as training data; the picture of a run."""

import json
import shutil

import pytest
import torch
from conftest import tiny_model

from data import arithmetic, encode_rows, read_chats
from decode import Generation, generate
from eval import cost, distill, plot, validate
from model import save_pretrained
from train import build_streams, dual_stream_loss


@pytest.fixture(scope="module")
def rows(tokenizer):
    return encode_rows([p.messages() for p in arithmetic("train", 7)], tokenizer, 256)[0]


def test_losses_are_those_of_training(rows, tokenizer):
    """Fault: another mean, another mask or another target than what was trained; masks counted at the wrong place of a block."""
    model = tiny_model()
    found = validate.validate(model, tokenizer, rows, 4, micro_tokens=400)
    batch = build_streams(rows, 4, tokenizer.mask_id)
    with torch.no_grad():
        mask, ar = dual_stream_loss(model, batch)
    n = sum(r.n_targets for r in rows)
    assert found["n_tokens"] == n and found["L_AR"] == pytest.approx(ar.item() / n, rel=1e-5)
    assert found["L_mask"] == pytest.approx(mask.item() / (n - len(rows)), rel=1e-5)
    sizes = [sum(1 for r in rows for t in range(r.n_targets - 1) if t % 4 == m) for m in range(4)]
    mean = sum(loss * size for loss, size in zip(found["L_mask_by_mask"], sizes)) / sum(sizes)
    assert mean == pytest.approx(found["L_mask"], rel=1e-5) and sum(b["n"] for b in found["calibration"]) == sum(sizes)


def test_a_mask_is_compared_with_the_clean_token_of_its_own_position(rows, tokenizer):
    """Fault: agreement taken one position off. Here the hidden state is the position alone, so both streams always agree."""

    class Places(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.lm_head = tiny_model().config, torch.nn.Linear(1, 512, bias=False)

        def forward(self, input_ids, positions, mask):
            return positions[..., None].float()

        def logits(self, hidden):
            return 9.0 * torch.nn.functional.one_hot(hidden[..., 0].long() % 500 + 5, 512)

    found = validate.validate(Places(), tokenizer, rows, 4)
    assert found["agreement"] == 1.0 and found["agreement_by_mask"] == [1.0] * 4
    [full] = [b for b in found["calibration"] if b["n"]]
    assert full["low"] == 0.9 and 0.9 < full["confidence"] < 0.95  # e^9 / (e^9 + 510)


def test_a_mask_that_no_chat_has(tokenizer):
    """Fault: the mean of nothing, NaN in a results file."""
    rows, _ = encode_rows([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]], tokenizer, 64)
    found = validate.validate(tiny_model(), tokenizer, rows, 8)
    assert found["L_mask_by_mask"][-1] is None and "-" in validate.table(found) and json.dumps(found, allow_nan=False)


def test_the_command_looks_at_the_last_16_chats_as_training_holds_out(model_dir, tmp_path, capsys):
    """Fault: chats that were learned among those that are to tell what was not; positions that the model does not have."""
    file, chats = tmp_path / "chats.jsonl", [p.messages() for p in arithmetic("train", 40)]
    file.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    argv = ["--model", str(model_dir), "--device", "cpu", "--dtype", "float32", "--quiet", "--json"]
    last = lambda: json.loads(capsys.readouterr().out.splitlines()[-1])
    assert validate.main([*argv, "--data", str(file)]) == 0 and (found := last())["n_chats"] == 16
    file.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats[24:]))
    assert validate.main([*argv, "--data", str(file)]) == 0 and last() == found
    for command in (validate, cost):
        assert command.main([*argv[:6], "--data", str(file), "--max-len", "513"]) == 2
        assert "--max-len 513: the model knows positions up to 512" in capsys.readouterr().err


def distilled(out, model_dir, questions, *more):
    argv = ["--model", str(model_dir), "--prompts", str(questions), "--out", str(out), "--max-new-tokens", "30", "--device", "cpu"]
    return distill.main([*argv, "--dtype", "float32", "--batch-size", "3", "--quiet", *more])


@pytest.fixture()
def questions(tmp_path):
    """Ten prompts of unlike length; some with an answer that must not be read, one without."""
    file = tmp_path / "questions.jsonl"
    chats = [p.messages() for p in arithmetic("test", 10)]
    chats[3] = chats[3][:1]
    file.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    return file


@pytest.fixture()
def ending(monkeypatch, tokenizer):
    """The random model never says EOS: let a token do that it says often."""
    from data import ChatTokenizer

    real = ChatTokenizer.from_pretrained
    said = [g.ids for g in generate(tiny_model(), tokenizer, [p.question for p in arithmetic("test", 10)], 1.0, 4, 30)]
    often = max(set(sum(said, [])), key=lambda t: sum(t in ids for ids in said[:8]) * (t not in said[9]))

    def load(folder):
        loaded = real(folder)
        loaded.eos_ids = [*loaded.eos_ids, often]
        return loaded

    monkeypatch.setattr(distill.ChatTokenizer, "from_pretrained", staticmethod(load))
    return load


def test_distilled_answers_are_the_models_own(model_dir, questions, tmp_path, ending, capsys):
    """Fault: another answer than greedy decoding of the prompt alone, order of finishing instead of order of prompts, a cut
    answer that passes for a whole one, the reference answer left in."""
    tokenizer, chats = ending(model_dir), read_chats(questions, need_answer=False)
    prompts = [c[:1] for c in chats]
    alone = [generate(tiny_model(), tokenizer, [p], 1.0, 4, 30)[0] for p in prompts]
    ended = [g.stop_reason == "eos" for g in alone]
    assert 0 < sum(ended) < 10
    whole = [[*p, {"role": "assistant", "content": g.text} | ({} if end else {"cut": True})] for p, g, end in zip(prompts, alone, ended)]
    for more, kept in ([], range(10)), (["--drop-cut"], [i for i in range(10) if ended[i]]):
        out = tmp_path / f"own{len(more)}.jsonl"
        assert distilled(out, model_dir, questions, *more) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [r["index"] for r in rows] == list(kept) and [r["messages"] for r in rows] == [whole[i] for i in kept]
        counts = json.loads(out.with_suffix(".about.json").read_text())["counts"]
        assert (counts["answers"], counts["cut"]) == (len(rows), 0 if more else 10 - sum(ended))
    assert "more were left out" in capsys.readouterr().out


def test_the_end_of_a_cut_answer_is_not_learned(tokenizer):
    """Fault: a model that learns to break off where --max-new-tokens happened to be."""
    for cut, last in ((False, tokenizer.im_end), (True, tokenizer.encode("b c")[-1])):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c", "cut": cut}]
        [row], _ = encode_rows([chat], tokenizer, 64)
        [(start, end)] = row.spans
        assert end == len(row.ids) and row.ids[-1] == last and row.ids[start] == tokenizer.encode("b c")[0]


def test_an_interrupted_distillation_goes_on(model_dir, questions, tmp_path, ending, capsys):
    """Fault: prompts answered twice or never, a torn line that breaks the file, another model's answers mixed in."""
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    assert distilled(whole, model_dir, questions) == 0 and distilled(torn, model_dir, questions) == 0
    lines = whole.read_bytes().split(b"\n")
    torn.write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2][:20])
    assert distilled(torn, model_dir, questions) == 0 and torn.read_bytes() == whole.read_bytes()
    assert distilled(torn, model_dir, questions, "--max-new-tokens", "9") == 2
    assert "max_new_tokens was 30, is 9" in capsys.readouterr().err
    about = torn.with_suffix(".about.json")
    whole_counts = json.loads(whole.with_suffix(".about.json").read_text())["counts"]
    about.write_text(json.dumps(json.loads(about.read_text()) | {"counts": {}}))  # killed before it had counted
    assert distilled(torn, model_dir, questions) == 0 and torn.read_bytes() == whole.read_bytes()
    counts = json.loads(about.read_text())["counts"]
    assert [counts[k] for k in ("prompts", "answers", "cut")] == [whole_counts[k] for k in ("prompts", "answers", "cut")]
    own = shutil.copytree(model_dir, tmp_path / "own")
    assert distilled(tmp_path / "b.jsonl", own, questions) == 0
    save_pretrained(own, tiny_model(seed=1), ending(model_dir), dtype=torch.float32)  # trained on, under the same name
    assert distilled(tmp_path / "b.jsonl", own, questions) == 2 and "other settings: model_sha256 was" in capsys.readouterr().err


def test_a_character_cut_in_two_is_not_learned(model_dir, questions, tmp_path, monkeypatch):
    """Fault: the replacement mark at the end of a cut answer, of which only some bytes were there, becomes training data."""
    made = lambda text, end: Generation(text=text, ids=[5, 6], n_forward=2, stop_reason=end)
    monkeypatch.setattr(distill, "answers", lambda server, prompts: iter([(0, made("a\ufffd", "length")), (1, made("b\ufffd", "eos")),
                                                                          (2, made("\ufffd", "length"))]))
    assert distilled(tmp_path / "own.jsonl", model_dir, questions, "--limit", "3") == 0
    rows = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert [(r["index"], r["messages"][-1]["content"]) for r in rows] == [(0, "a"), (1, "b\ufffd")]


def test_in_order():
    """Fault: rows held back for ever, or written before their turn."""
    assert list(distill.in_order([(1, "d"), (0, "c"), (3, "f"), (2, "e")])) == [(0, "c"), (1, "d"), (2, "e"), (3, "f")]


def test_the_picture_of_a_run(tmp_path, capsys):
    """Fault: a run without held-out chats, with one stage, or still running breaks the picture."""
    pytest.importorskip("matplotlib")
    about, step = {"settings": {}}, {"L_mask": 2.0, "L_AR": 1.0}
    look = {"L_AR": 1.0, "L_mask": 2.0, "L_mask_by_mask": [1.5, 2.5, None], "calibration": [{"n": 0, "confidence": None, "agreement": None},
            {"n": 3, "confidence": 0.5, "agreement": 0.4}]}
    for i, lines in enumerate((
        [{"stage": "mars", "step": 1, **step}],
        [{"stage": "sft", "step": 1, **step, "L_mask": None}, {"stage": "mars", "step": 0, "val": look}, {"stage": "mars", "step": 1, **step},
         {"stage": "mars", "step": 1, "val": look | {"tokens_per_forward": 1.4}}],
    )):
        run = tmp_path / str(i)
        run.mkdir()
        (run / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [about, *lines]))
        assert plot.main([str(run)]) == 0 and (run / "curves.png").stat().st_size > 1000
    steps, looks = plot.read_log(tmp_path / "1" / "log.jsonl")
    assert [r["at"] for r in steps] == [1, 2] and [r["at"] for r in looks] == [1, 2]
    (tmp_path / "1" / "log.jsonl").write_text(json.dumps(about) + "\n")
    assert plot.main([str(tmp_path / "1")]) == 2 and plot.main([str(tmp_path / "none")]) == 2
    with (tmp_path / "0" / "log.jsonl").open("a") as log:
        log.write('{"stage": "mars", "st')  # it is being written
    assert len(plot.read_log(tmp_path / "0" / "log.jsonl")[0]) == 1
    for content in ("", "words\n", '{"rows": []}\n', '[1]\n', '{"settings": {}}\n{"tau": 1}\n'):
        (tmp_path / "other").write_text(content)
        assert plot.main([str(tmp_path / "other")]) == 2 and "other: not a log of train.py" in capsys.readouterr().err.splitlines()[-1]
    assert plot.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0] * 3)
