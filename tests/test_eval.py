"""What the measuring tools conclude from what they see."""

import json

import pytest
from conftest import tiny_model

from data import arithmetic
from decode import generate
from eval import exactness, run


def test_wilson_interval():
    """Fault: an interval outside 0..1, or of no width at 0 of n. Values of 8 of 10 from Wilson's formula worked by hand."""
    assert run.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert run.wilson(0, 50)[0] == 0 and 0.05 < run.wilson(0, 50)[1] < 0.1 and run.wilson(50, 50)[1] == 1


def test_a_sweep_is_written_with_where_it_comes_from(model_dir, tmp_path, capsys):
    """Fault: rates over something else than committed tokens; samples and summary that disagree; CASES 37."""
    out = tmp_path / "r.json"
    argv = ["--model", str(model_dir), "--limit", "5", "--tau", "1,0", "--max-new-tokens", "9", "--out", str(out), "--json"]
    assert run.main(argv) == 0
    result, last = json.loads(out.read_text()), json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {k: result[k] for k in last} == last and set(last) == {"task", "n", "rows"}
    assert {"command", "commit", "torch", "machine", "device", "dtype", "seed", "data_sha256"} <= set(result)
    samples = [json.loads(line) for line in (tmp_path / "r.samples.jsonl").read_text().splitlines()]
    assert result["rows"][0]["identical_to_first_tau"] == 1 > result["rows"][1]["identical_to_first_tau"]
    for row in result["rows"]:
        mine = [s for s in samples if s["tau"] == row["tau"]]
        assert len(mine) == 5 and row["accuracy"] == sum(s["correct"] for s in mine) / 5
        assert row["tokens_per_forward"] == sum(len(s["ids"]) for s in mine) / sum(s["n_forward"] for s in mine)


def test_right_answers_count_as_right(model_dir, monkeypatch):
    """Fault: scoring that cannot be passed, or cannot be failed."""
    problems = arithmetic("test", 4)
    said = [p.answer for p in problems[:3]] + ["no number"]

    def fake(model, tokenizer, prompts, *a):
        from decode import Generation

        return [Generation(ids=[5], text=said.pop(0), n_forward=1, accepted=[1]) for _ in prompts]

    monkeypatch.setattr(run, "generate", fake)
    row = run.evaluate(None, None, [p.messages() for p in problems], 1.0, 4, 2, 9, "cursor", quiet=True)
    assert row["accuracy"] == 0.75


@pytest.mark.parametrize("argv", [["--tau", "x"], ["--limit", "0"], ["--batch-size", "0"]])
def test_impossible_options(argv, capsys):
    """Fault: a traceback for a typing error."""
    with pytest.raises(SystemExit) as e:
        run.main(["--model", "x", *argv])
    assert e.value.code == 2


def test_a_difference_that_is_no_tie_is_an_error(tokenizer):
    """Fault: any difference explained away as rounding. The same difference is a tie for a model that cannot decide."""
    model = tiny_model()
    prompts = [tokenizer.encode_prompt("Hi")]
    [g] = generate(model, tokenizer, ["Hi"], 1.0, 4, 8)
    right = [(g.ids, g.accepted)]
    wrong = [([*g.ids[:5], g.ids[5] % 400 + 5, *g.ids[6:]], g.accepted)]
    assert exactness.compare(model, tokenizer, prompts, right, right, 1.0, 4)["equal"] == 1
    assert exactness.compare(model, tokenizer, prompts, right, wrong, 1.0, 4)["errors"] == 1
    model.logits = lambda h, real=model.logits: real(h) * 1e-6
    assert exactness.compare(model, tokenizer, prompts, right, wrong, 1.0, 4)["ties"] == 1


def test_exactness_of_a_tiny_model(model_dir, tmp_path, capsys):
    """Fault: the check itself broken. Needs transformers."""
    pytest.importorskip("transformers")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"messages": p.messages()}) + "\n" for p in arithmetic("test", 6)))
    argv = ["--model", str(model_dir), "--prompts", str(prompts), "--limit", "6", "--tokens", "12", "--cache-tokens", "8", "--json"]
    assert exactness.main(argv) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["errors"] == 0 and result["transformers"]["tokens"] == 200 and len(result) == 10
