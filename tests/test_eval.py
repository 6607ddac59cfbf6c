"""What the measuring tools conclude from what they see."""

import hashlib
import json

import pytest
import torch
from conftest import ROOT, tiny_model

import train
from data import arithmetic
from decode import generate
from eval import cost, exactness, experiments, pictures, quick, results, run, speed, tasks
from model import UserError


def test_wilson_interval():
    """Fault: an interval outside 0..1, or of no width at 0 of n. Values of 8 of 10 from Wilson's formula worked by hand."""
    assert run.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert run.wilson(0, 50)[0] == 0 and 0.05 < run.wilson(0, 50)[1] < 0.1 and run.wilson(50, 50)[1] == 1


def test_answers_are_followed_to_their_first_difference():
    """Fault: tokens that are equal again by chance counted; the longer of two answers taken for the same."""
    first = [[5, 6, 7, 8], [1, 2], [3, 4, 9, 9]]
    assert run.agreement(first, [[5, 6, 0, 8], [1, 2], [3, 4, 9]]) == (pytest.approx(1 / 3), pytest.approx((2 + 2 + 3) / 10))
    assert run.agreement([[]], [[4]]) == (0, 0)


def answer_rows(out):
    head, *samples = map(json.loads, out.with_name(f"{out.stem}.samples.jsonl").read_text().splitlines())
    assert set(head) == {"settings"}
    return samples


def test_a_run_is_written_with_where_it_comes_from(model_dir, tmp_path, capsys):
    """Fault: rates over something else than committed tokens; samples and summary that disagree."""
    out = tmp_path / "r.json"
    argv = ["--model", str(model_dir), "--limit", "5", "--tau", "1,0", "--max-new-tokens", "9", "--out", str(out), "--json", "--quiet"]
    assert run.main(argv) == 0
    result, last = json.loads(out.read_text()), json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {k: result[k] for k in last} == last and set(last) == {"task", "n", "rows"}
    assert {"command", "commit", "torch", "machine", "device", "dtype", "seed", "data_sha256"} <= set(result)
    files = sorted(p for p in model_dir.iterdir() if p.name != "trainer_state.pt")
    assert result["settings"]["model_sha256"] == hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
    assert result["settings"]["questions_sha256"] == tasks.questions_sha256(tasks.read_arithmetic(None))
    samples = answer_rows(out)
    assert {"prompt", "text", "gold", "extracted", "correct", "accepted", "stop_reason"} <= set(samples[0])
    assert result["rows"][0]["identical_to_first_tau"] == 1 > result["rows"][1]["identical_to_first_tau"]
    for row in result["rows"]:
        mine = [s for s in samples if s["tau"] == row["tau"]]
        assert len(mine) == 5 and row["accuracy"] == sum(s["correct"] for s in mine) / 5
        assert row["tokens_per_forward"] == sum(len(s["ids"]) for s in mine) / sum(s["n_forward"] for s in mine)


def test_an_interrupted_run_goes_on(model_dir, tmp_path, monkeypatch, capsys):
    """Fault: answers lost, answered twice or of another batch; half a line or half a batch taken; another model's answers taken."""
    argv = ["--model", str(model_dir), "--limit", "7", "--tau", "1,0", "--max-new-tokens", "9", "--batch-size", "3", "--quiet", "--out"]
    assert run.main([*argv, str(tmp_path / "straight.json")]) == 0
    real, asked = run.generate, []

    def counted(model, tokenizer, prompts, *more, **named):
        if named.get("max_new_tokens") == 2:  # the warm-up
            return real(model, tokenizer, prompts, *more, **named)
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(len(prompts))
        return real(model, tokenizer, prompts, *more, **named)

    out, file = tmp_path / "stopped.json", tmp_path / "stopped.samples.jsonl"
    with monkeypatch.context() as m:
        m.setattr(run, "generate", counted)
        assert run.main([*argv, str(out)]) == 130 and asked == [3, 3, 1, 3] and not out.exists()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:10]) + lines[10][:-40])  # killed while it wrote the second batch of the second tau
    asked[:] = []
    monkeypatch.setattr(run, "generate", counted)
    assert run.main([*argv, str(out)]) == 0 and asked == [3, 3, 1]
    def without_times(of):
        return [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_second")} for r in of]

    straight, stopped = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("straight", "stopped"))
    assert without_times(straight["rows"]) == without_times(stopped["rows"])
    assert without_times(answer_rows(tmp_path / "straight.json")) == without_times(answer_rows(out))
    asked[:] = []
    assert run.main([*argv, str(out), "--limit", "8"]) == 0 and asked == [2, 2]  # more questions: only the last, shorter batches anew
    asked[:] = []
    assert run.main([*argv, str(out), "--limit", "5"]) == 0 and asked == [2, 2]  # fewer: 3..4 were answered with 5
    asked[:] = []
    for limit in ("8", "7", "5", "3"):  # nothing was lost by asking for less
        assert run.main([*argv, str(out), "--limit", limit]) == 0 and asked == []
    monkeypatch.setitem(run.TASKS, "arithmetic", run.TASKS["arithmetic"]._replace(score=lambda text, question: ("new", True)))
    assert run.main([*argv, str(out), "--limit", "8"]) == 0 and asked == []  # but all are scored by the code of now
    assert all(r["accuracy"] == 1.0 and r["n"] == 8 for r in json.loads(out.read_text())["rows"])
    assert all(s["extracted"] == "new" for s in answer_rows(out) if s["batch"] == 3)
    capsys.readouterr()
    assert run.main([*argv, str(out), "--max-new-tokens", "8"]) == 2
    assert "max_new_tokens was 9, is 8" in capsys.readouterr().err
    asked[:] = []
    assert run.main([*argv, str(out), "--max-new-tokens", "8", "--tau", "1", "--overwrite"]) == 0 and asked == [3, 3, 1]


def test_two_runs_are_compared_question_by_question(model_dir, tmp_path, capsys):
    """Fault: a difference of means taken for a paired one; answers of different questions compared; a tau of the other run mixed up."""
    argv = ["--model", str(model_dir), "--limit", "4", "--max-new-tokens", "9", "--quiet", "--json", "--out"]
    assert run.main([*argv, str(tmp_path / "one.json"), "--tau", "1"]) == 0
    assert run.main([*argv, str(tmp_path / "two.json"), "--tau", "1,0", "--against", str(tmp_path / "one.json")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    same, fast = last["against"]["rows"]
    assert same["same_text"] == 1 > fast["same_text"] and (same["against_tau"], fast["against_tau"]) == (1.0, 1.0) and same["n"] == 4
    file = tmp_path / "one.samples.jsonl"
    file.write_text(file.read_text().replace("How many", "How much"))
    assert run.main([*argv, str(tmp_path / "two.json"), "--tau", "1", "--against", str(tmp_path / "one.json")]) == 2
    assert "its question 0 is another one" in capsys.readouterr().err
    file.write_text(file.read_text().replace("How much", "How many").replace('"task": "arithmetic"', '"task": "gsm8k"'))
    assert run.main([*argv, str(tmp_path / "two.json"), "--tau", "1", "--against", str(tmp_path / "one.json")]) == 2
    assert "is of the task gsm8k, this run of arithmetic" in capsys.readouterr().err
    file.write_text(file.read_text().replace('"task": "gsm8k"', '"task": "arithmetic"').replace('"gold": ', '"gold": 7'))
    assert run.main([*argv, str(tmp_path / "two.json"), "--tau", "1", "--against", str(tmp_path / "one.json")]) == 2
    assert "its question 0 is another one" in capsys.readouterr().err
    argv = ["--model", "none there", "--tau", "1,0.5", "--against"]  # found out before a model is loaded
    assert run.main([*argv, str(tmp_path / "typo.json")]) == 2 and "there is no typo.samples.jsonl" in capsys.readouterr().err
    file.write_text('{"settings": {}}\n{"setting": [], "index": 0}\n')
    assert run.main([*argv, str(tmp_path / "one.json")]) == 2 and "not of eval.run" in capsys.readouterr().err
    file.write_text((tmp_path / "two.samples.jsonl").read_text())
    assert run.main([*argv, str(tmp_path / "one.json")]) == 2 and "has no tau 0.5; it has 1, 0" in capsys.readouterr().err


def test_two_processes_do_not_share_a_file(tmp_path):
    """Fault: answers of two runs at once in one file, of which the second's beginning deletes the first's."""
    with run.only_one(tmp_path / "a.samples.jsonl"):
        with run.only_one(tmp_path / "b.samples.jsonl"):
            with pytest.raises(UserError, match="another process is writing it"), run.only_one(tmp_path / "a.samples.jsonl"):
                pass
    with run.only_one(tmp_path / "a.samples.jsonl"):
        pass


def test_paired_difference():
    """Fault: an interval of no width where both agree; the sign turned round. 12 and 4 of 100, worked by hand."""
    a, b = [True] * 52 + [True] * 12 + [False] * 4 + [False] * 32, [True] * 52 + [False] * 12 + [True] * 4 + [False] * 32
    found = run.paired(a, b)
    assert (found["difference"], found["only_here"], found["only_there"]) == (0.08, 12, 4)
    assert (found["low"], found["high"]) == pytest.approx((8 / 102 - 1.96 * (17 - 64 / 102) ** 0.5 / 102, 8 / 102 + 1.96 * (17 - 64 / 102) ** 0.5 / 102))
    none = run.paired([True] * 10, [True] * 10)
    assert none["low"] < 0 < none["high"] and none["difference"] == 0


def test_right_answers_count_as_right(monkeypatch):
    """Fault: scoring that cannot be passed, or cannot be failed."""
    problems = arithmetic("test", 4)
    said = [p.answer for p in problems[:3]] + ["no number"]

    def fake(model, tokenizer, prompts, *a, **more):
        from decode import Generation

        return [Generation(ids=[5], text=said.pop(0), n_forward=1, accepted=[1]) for _ in prompts]

    monkeypatch.setattr(run, "generate", fake)
    row = run.evaluate(None, None, tasks.read_arithmetic(None, 4), tasks.TASKS["arithmetic"], 1.0, 4, 2, 9, quiet=True)
    assert row["accuracy"] == 0.75


@pytest.mark.parametrize("argv", [["--tau", "x"], ["--tau", "1,-1"], ["--tau", "nan"], ["--limit", "0"], ["--batch-size", "0"]])
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


def test_before_and_after(tokenizer):
    """Fault: rows that belong to another tau or model; a ratio that is not to the model before MARS."""
    before, after = tiny_model(seed=1), tiny_model(seed=2)
    result = quick.measure(before, after, tokenizer, 3, block_size=4, taus=(1.0, 0.0), n_rounds=1, quiet=True)
    assert list(result["mars"]) == ["tau1", "tau0"] and result["n"] == 3
    sft, one, all_four = result["sft"], *result["mars"].values()
    assert sft["tokens_per_forward"] == one["tokens_per_forward"] == 1 < 3 < all_four["tokens_per_forward"] <= 4
    assert sft["speedup"] == sft["speedup_batch16"] == 1 and all_four["speedup"] > 0
    assert sft["identical_to_before"] == 1 > one["identical_to_before"]
    shown = quick.table(result).splitlines()
    assert len(shown) == 4 and shown[1].startswith("before MARS") and shown[3].startswith("MARS, tau 0")
    only = quick.measure(before, None, tokenizer, 3, taus=(1.0,), n_rounds=1, quiet=True)
    assert only["mars"] == {} and only["sft"]["accuracy"] == sft["accuracy"]


def test_the_ratio_is_of_rates_in_the_same_round():
    """Fault: seconds for tokens per second, a first (cold) round that counts, a mean that one slow round spoils."""
    rates = iter([9, 1, 1, 4, 1, 2, 1, 3])  # tokens per second of (a, b) by round; the first round only warms up
    mode = lambda group: speed.Timing(12, 12, 12 / next(rates), 0.0, 1, [[5] * 12])
    timings = speed.rounds({"a": mode, "b": mode}, [["q"]] * 4, type("Bar", (), {"update": lambda self: None})())
    assert speed.ratios(timings["b"], timings["a"]) == pytest.approx([4, 2, 3])
    assert speed.summary(1, "b", timings["b"], timings["a"])["ratio_to_ar"] == pytest.approx(3)


def test_speed_table(model_dir, tmp_path, capsys):
    """Fault: a mode that decodes something else (AR, caches and transformers say the same at tau 1); padding or what lies
    behind an EOS counted; the object other programs read renamed."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    argv = f"--model {model_dir} --batch 1,3 --modes none,block4,cursor --tau 1 --peer transformers --rounds 2 --max-new-tokens 12 --json --quiet"
    argv += f" --dtype float32 --device cpu --out {tmp_path / 'r.json'} --plot {tmp_path / 'r.png'}"
    assert speed.main(argv.split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["batch"], r["mode"]) for r in result["rows"]] == [
        (n, m) for n in (1, 3) for m in ("ar", "none", "block4", "cursor", "transformers")]
    for r in result["rows"]:
        assert r["identical_to_ar"] == 1 and r["tokens_per_second"] > 0 and 0 < r["prefill_seconds"] < r["seconds"]
        assert r["tokens_per_forward"] == 1 or r["mode"] == "block4"
        assert r["mode"] != "ar" or r["ratio_to_ar"] == r["ratio_low"] == r["ratio_high"] == 1
    assert set(result["window_over_ar_forward"]) == {"1", "3"} and all(v > 0 for v in result["limits"].values())
    assert (tmp_path / "r.png").stat().st_size > 5000 and json.loads((tmp_path / "r.json").read_text())["torch"] == torch.__version__


@pytest.mark.parametrize("argv", ["--batch 0", "--batch 1,x", "--modes none,paged", "--modes block0", "--rounds 0"])
def test_speed_options_out_of_range_are_named(argv, capsys):
    """Fault: a traceback, or a mode silently left out."""
    with pytest.raises(SystemExit):
        speed.main(["--model", "tiny-mars", *argv.split()])
    assert argv.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_what_lies_behind_an_eos_is_not_counted():
    """Fault: transformers' padding counted as tokens."""
    assert speed.whole([5, 6, 2, 2, 2], [2, 3]) == [5, 6, 2] and speed.whole([5, 6], [2]) == [5, 6]


@pytest.mark.parametrize("stages, steps", [("sft", "1"), ("mars", "1"), ("sft,mars", "1,1")])
def test_training_ends_in_the_table(tmp_path, capsys, monkeypatch, stages, steps):
    """Fault: the object other programs read renamed; scored in memory instead of what was saved. (Timing has tests of its own.)"""
    monkeypatch.setattr(quick, "speedups", lambda modes, *a: [1.0] * len(modes))
    argv = "--init scratch --batch-size 4 --problems 2 --quiet --json --device cpu".split()
    has = [] if stages == "sft" else ["tau1", "tau0.95"]
    assert train.main([*argv, "--stages", stages, "--steps", steps, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "2 unseen problems" in out and result["sft"]["accuracy"] >= 0 and result["seconds"] > 0
    written = json.loads((tmp_path / "result.json").read_text())
    assert {k: written[k] for k in result} == result and {"command", "torch", "machine", "dtype", "settings"} <= set(written)
    assert all({"accuracy", "tokens_per_forward", "speedup"} <= set(result["mars"][tau]) for tau in has)
    assert bool(result["mars"]) == bool(has)


@pytest.mark.parametrize("e", experiments.EXPERIMENTS, ids=lambda e: e.name)
def test_every_experiment_changes_a_line_that_is_there(e):
    """Fault: train.py moved on, and an experiment of the README measures the unchanged code."""
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    new = experiments.changed(source, e)
    compile(new, e.name, "exec")
    assert (new != source) == bool(e.old)


def test_an_experiment_without_its_line_is_refused():
    """Fault: the unchanged code measured under the name of a change."""
    with pytest.raises(UserError, match="must hold this line once"):
        experiments.changed("x = 1\n", next(e for e in experiments.EXPERIMENTS if e.old))


def test_experiments_do_what_they_say(tokenizer):
    """Fault: a change that runs but leaves the method as it was. Looks at mask and labels of the changed code."""
    row = train.Row(list(range(5, 17)), [(4, 12)])  # a prompt of 4, an answer of 8
    seen = {}
    for e in experiments.EXPERIMENTS:
        if e.old or e.name == "as it is":
            code = {"__name__": "changed"}
            exec(compile(experiments.changed((ROOT / "train.py").read_text(encoding="utf-8"), e), e.name, "exec"), code)
            torch.manual_seed(0)
            b = code["build_streams"]([row], 4, 3, multiple=1)
            seen[e.name] = b, code["mars_mask"](b.positions, b.starts, b.noisy)[0, 12:]
    base, mask = seen["as it is"]
    assert mask[0, 12:].sum() == 1 and seen["bidirectional block"][1][0, 12:].tolist() == [True] * 4 + [False] * 4
    assert not mask[7, 8] and seen["leak"][1][7, :12].sum() == 11
    assert base.labels[0, 12] == 10 and seen["no shift"][0].labels[0, 12:].tolist() == row.ids[4:]
    assert 0 < (seen["random masking"][0].input_ids[0, 12:] == 3).sum() < 8 == (base.input_ids[0, 12:] == 3).sum()


def test_pictures(model_dir, tmp_path, capsys, tokenizer):
    """Fault: a picture that cannot be drawn again. Needs matplotlib."""
    pytest.importorskip("matplotlib")
    result = quick.measure(tiny_model(), tiny_model(), tokenizer, 2, 4, taus=(1.0, 0.5), n_rounds=1, quiet=True)
    (tmp_path / "r.json").write_text(json.dumps(result))
    assert pictures.main(["--model", str(model_dir), "--results", str(tmp_path / "r.json"), "--out", str(tmp_path / "p")]) == 0
    assert {p.name for p in (tmp_path / "p").iterdir() if p.stat().st_size > 5000} == {"mask.png", "shaded.png", "curve.png"}


def test_an_experiment_is_run_once_per_setting(tmp_path, monkeypatch, capsys):
    """Fault: a row of other settings passed off as this one's, or half an hour spent again."""
    ran = []

    def fake(e, n, seed, made):
        ran.append((e.name, n))
        return [{"tau": 1.0, "accuracy": 0.5, "tokens_per_forward": 1.0}]

    monkeypatch.setattr(experiments, "run", fake)
    argv = ["--out", str(tmp_path / "r.json"), "--only"]
    for more in (["leak"], ["leak,no shift"], ["leak", "--problems", "9"]):
        assert experiments.main([*argv, *more]) == 0
    assert ran == [("leak", 300), ("no shift", 300), ("leak", 9)]
    assert "| leak | `noisy_to_clean = noisy_q & ~noisy_k & (pos_k < pos_q)` |" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "r.json").read_text())["experiments"]) == ["leak", "no shift"]
    with pytest.raises(SystemExit):
        experiments.main([*argv, "nothing"])


def test_ctrl_c_while_scoring_loses_nothing(tmp_path, monkeypatch, capsys):
    """Fault: told that there is no checkpoint when the model is finished and only its score is missing."""

    def stop(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(quick, "measure", stop)
    argv = "--init scratch --stages sft --steps 1 --batch-size 2 --quiet --device cpu".split()
    assert train.main([*argv, "--out", str(tmp_path)]) == 130
    assert f"{tmp_path / 'sft'} is finished" in capsys.readouterr().err and (tmp_path / "sft" / "config.json").is_file()


def test_cost_of_a_step(model_dir, tmp_path, capsys, monkeypatch):
    """Fault: the two stages swapped or timed on other chats; an arithmetic that leaves out the masks or the head."""
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": p.messages()}) + "\n" for p in arithmetic("train", 9)))
    argv = ["--model", str(model_dir), "--data", str(file), "--batch-size", "3", "--rounds", "2", "--device", "cpu", "--dtype", "float32"]
    taken, real = [], cost.train.optimizer_step

    def step(model, optimizer, rows, block_size, *more):
        taken.append((block_size, [list(r.ids) for r in rows]))
        return real(model, optimizer, rows, block_size, *more)

    monkeypatch.setattr(cost.train, "optimizer_step", step)
    assert cost.main([*argv, "--out", str(tmp_path / "c.json"), "--json"]) == 0
    (a, b, c), blocks = [taken[i][1] for i in (0, 1, 6)], [None, None, 4, 4, None, 4, None, 4]  # memory, then two rounds
    assert [t[0] for t in taken] == blocks and [t[1] for t in taken] == [a, b, a, b, b, b, c, c] and a != b != c
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["rounds"]) == 2 and 1 < result["flop_ratio"] < 2 and result["lowest"] <= result["time_ratio"] <= result["highest"]
    from data import Row

    row, config = Row(list(range(10)), [(4, 10)]), tiny_model().config                 # 10 clean tokens, 6 masks, 6 + 5 targets
    layers, head = 3 * 64 * (2 * 64 + 2 * 32 + 3 * 96), 64 * 512
    assert cost.flop_ratio(config, [row], 4) == pytest.approx((16 * layers + 11 * head) / (10 * layers + 6 * head))


def test_data_by_name_has_its_hash_in_the_results(tmp_path, monkeypatch):
    """Fault: a results file that does not tell which data it was made with, when they were named and not given as a file."""
    (tmp_path / "file").write_bytes(b"rows")
    monkeypatch.setattr(results, "download", lambda name: tmp_path / "file")
    for data in ("gsm8k", str(tmp_path / "file")):
        assert results.provenance(data=data)["data_sha256"] == hashlib.sha256(b"rows").hexdigest()
    assert results.provenance(data="arithmetic")["data_sha256"] is None
