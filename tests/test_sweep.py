"""The sweep over settings, and Jacobi decoding as its baseline."""

import json

import pytest
from conftest import ROOT, tiny_model

from data import ChatTokenizer, arithmetic
from decode import generate
from eval import jacobi, sweep
from model import UserError, load_pretrained


@pytest.mark.parametrize("block_size", [1, 2, 4, 7])
def test_jacobi_says_what_one_token_at_a_time_says(tokenizer, block_size):
    """Fault: a guess kept that was wrong, keys of wrong guesses read later, a finished row that runs over the end of the cache; counts
    of other tokens than those of the answer."""
    prompts = ["Hi", "How many cards?", "A very much longer question about cards, books and shells on the table of Ada."]
    trained = load_pretrained(ROOT / "checkpoints" / "tiny-mars"), ChatTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-mars")
    for model, its, asked in ((tiny_model(), tokenizer, prompts), (*trained, [p.question for p in arithmetic("test", 6)])):
        plain = generate(model, its, asked, 1.0, 4, 60)
        done = jacobi.generate(model, its, asked, block_size, 60)
        assert [g.ids for g in done] == [g.ids for g in plain] and [g.text for g in done] == [g.text for g in plain]
        assert [g.stop_reason for g in done] == [g.stop_reason for g in plain]
        for g in done:
            assert sum(g.accepted) == len(g.ids) and len(g.accepted) == g.n_forward and max(g.accepted) <= block_size
    if block_size > 1:  # equations repeat numbers, so some guesses are right
        assert sum(len(g.ids) for g in done) > 1.1 * sum(g.n_forward for g in done)


def test_a_sweep_and_its_resumption(model_dir, tmp_path, capsys, monkeypatch):
    """Fault: rows of another setting, a speed-up over another model's plain decoding, answers lost or doubled by an interruption."""
    argv = ["--model", str(model_dir), "--limit", "5", "--batch-size", "2", "--blocks", "2,3", "--measures", "probability,entropy", "--quiet",
            "--tau-probability", "0.9,0", "--tau-entropy", "0.1,9", "--max-new-tokens", "8", "--json", "--out"]
    assert sweep.main([*argv, str(tmp_path / "a.json")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["method"], r["block_size"], r["measure"], r["tau"]) for r in result["rows"]] == [
        ("ar", 1, "probability", 1.0), ("jacobi", 2, "probability", 1.0), ("jacobi", 3, "probability", 1.0),
        ("mars", 2, "probability", 0.9), ("mars", 2, "probability", 0.0), ("mars", 3, "probability", 0.9), ("mars", 3, "probability", 0.0),
        ("mars", 2, "entropy", 0.1), ("mars", 2, "entropy", 9.0), ("mars", 3, "entropy", 0.1), ("mars", 3, "entropy", 9.0)]
    plain, jacobi2, _, _, two, _, three, *_, all_three = result["rows"]
    assert plain["tokens_per_forward"] == plain["speedup"] == plain["identical_to_ar"] == plain["prefix_of_ar"] == jacobi2["identical_to_ar"] == 1
    assert two["tokens_per_forward"] == 2 and three["tokens_per_forward"] == all_three["tokens_per_forward"] == pytest.approx(8 / 3)
    file = tmp_path / "b.samples.jsonl"
    lines = (tmp_path / "a.samples.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:30]) + lines[30][:-9])  # killed in its second round
    real, n = sweep.answer, []
    monkeypatch.setattr(sweep, "answer", lambda *a: n.append(1) or real(*a))
    assert sweep.main([*argv, str(tmp_path / "b.json")]) == 0 and len(n) == 22
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    timeless = lambda of: [{k: v for k, v in r.items() if k not in ("speedup", "speedups", "tokens_per_second")} for r in of["rows"]]
    assert timeless(again) == timeless(result)
    assert sweep.main([*argv, str(tmp_path / "b.json"), "--limit", "4"]) == 2 and "limit was 5, is 4" in capsys.readouterr().err


def test_what_a_sweep_shows(tmp_path):
    """Fault: a column under another block size; a cliff that is not reported, or where there is none."""
    row = lambda method, B, tau, right, rate: {"model": "m", "method": method, "block_size": B, "measure": "probability", "tau": tau,
        "accuracy": right, "low": right, "high": right, "tokens_per_forward": rate, "speedup": rate}  # fmt: skip
    rows = [row("ar", 1, 1.0, 0.9, 1.0), row("jacobi", 4, 1.0, 0.9, 1.1), row("mars", 4, 0.9, 0.9, 2.0), row("mars", 4, 0.5, 0.5, 3.0),
            row("mars", 2, 0.9, 0.91, 1.5), row("mars", 2, 0.5, 0.91, 1.6)]  # fmt: skip
    assert sweep.markdown(rows).splitlines()[:4] == ["| probability | B=4 | B=2 |", "|---|---|---|",
        "| 0.9 | 90.0 % at 2.00 | 91.0 % at 1.50 |", "| 0.5 | 50.0 % at 3.00 | 91.0 % at 1.60 |"]  # fmt: skip
    [cliff] = sweep.steepest(rows)
    assert (cliff["block_size"], cliff["from_tau"], cliff["to_tau"]) == (4, 0.9, 0.5) and cliff["drop"] == pytest.approx(0.4)
    assert sweep.steepest(rows[::-1]) == sweep.steepest(rows)  # in whatever order the taus were given
    assert sweep.short(["out/a/mars", "out/b/mars"]) == {"out/a/mars": "a/mars", "out/b/mars": "b/mars"}
    two = sweep.markdown([r | {"model": m} for m in ("out/a/mars", "out/b/mars") for r in rows])
    assert "| probability | a/mars, B=4 | a/mars, B=2 | b/mars, B=4 | b/mars, B=2 |" in two
    one = sweep.detail([r | {"identical_to_ar": 0.25, "prefix_of_ar": 0.5} for r in rows[:3]]).splitlines()
    assert one[3:] == ["| Jacobi, 4 a forward | 90.0 %, 90.0 .. 90.0 | 1.10 | 1.10x | 25 % | 50 % |",
                       "| tau 0.9 | 90.0 %, 90.0 .. 90.0 | 2.00 | 2.00x | 25 % | 50 % |"]  # fmt: skip
    pytest.importorskip("matplotlib")
    sweep.plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_speed_ups_are_medians_of_whole_batches_in_turn():
    """Fault: a last batch of one question weighs as much as one of 25; a setting always follows the same one."""
    plain, fast = sweep.Setting("m", "ar", 1, "probability", 1.0), sweep.Setting("m", "mars", 4, "probability", 0.9)
    sample = lambda s, i, seconds: {"setting": list(s), "index": i, "ids": [1] * 6, "n_forward": 3, "correct": True, "seconds": seconds}
    samples = [sample(plain, i, 6.0) for i in range(5)] + [sample(fast, i, t) for i, t in enumerate((3, 3, 2, 2, 60))]
    rows = sweep.summarize([plain, fast], samples, 2)
    assert [r["speedup"] for r in rows] == [1.0, 2.5]
    assert sweep.summarize([plain, fast], [s for s in samples if s["index"] == 0], 2)[1]["speedup"] == 2  # no whole batch at all
    listed = list("abcd")
    orders = [sweep.in_turn(listed, i) for i in range(40)]
    assert all(sorted(order) == sorted(listed) for order in orders) and orders == [sweep.in_turn(listed, i) for i in range(40)]
    for a in listed:
        behind = [order[order.index(a) + 1] for order in orders if order[-1] != a]
        assert all(5 <= behind.count(b) <= 20 for b in listed if b != a)  # of 40: every neighbour about equally often


def test_jacobi_refuses_a_broken_model(tokenizer):
    """Fault: a model of NaN gets a flattering speed."""
    model = tiny_model()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        jacobi.generate(model, tokenizer, ["Hi"], 4, 8)


@pytest.mark.parametrize("argv", [["--measures", "luck"], ["--blocks", "0"], ["--tau-entropy", "x", "--measures", "entropy"], ["--task", "humaneval"]])
def test_impossible_options(argv, capsys):
    """Fault: a traceback for a typing error; programs run unasked."""
    with pytest.raises(SystemExit) as e:
        sweep.main(["--model", "x", "--out", "y", *argv])
    assert e.value.code == 2 and argv[0] in capsys.readouterr().err
