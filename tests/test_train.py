"""The loop: schedule, budget, checkpoints, exact resume."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model

import train
from data import ChatTokenizer, arithmetic, encode_rows
from model import load_pretrained
from train import build_streams, dual_stream_loss, learning_rate, start_mask_embedding

SMALL = "--init scratch --data-size 60 --batch-size 8 --save-every 2 --problems 0 --quiet".split()
SMALL += "--lr 2e-3 --device cpu --dtype float32 --micro-tokens 600".split()  # a step is 2 to 4 groups


def run(out, *more, stages="sft,mars", steps="5,5"):
    return train.main([*SMALL, "--stages", stages, "--steps", steps, "--anchor", "random", "--out", str(out), *more])


def settled(out, *more):
    """Arguments as run() leaves them."""
    args = train.parse([*SMALL, "--anchor", "start", "--out", str(out), *more])
    args.device, args.dtype = torch.device("cpu"), torch.float32
    return args


def losses(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:]]
    return [(r["stage"], r["step"], r["L_mask"], r["L_AR"], r["grad_norm"], r["lr"]) for r in records]


def die_at(monkeypatch, n):
    """The process ends at its n-th optimizer step, as Ctrl-C would."""
    real, calls = train.optimizer_step, []

    def step(*args):
        calls.append(1)
        if len(calls) > n:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(train, "optimizer_step", step)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    assert run(out) == 0
    return out


@pytest.mark.parametrize("at", [3, 5, 8])
def test_resume_repeats_the_run_to_the_last_bit(straight, tmp_path, monkeypatch, at):
    """In the first stage, between stages, in the second, all mid-epoch (60 chats, 8 a step). Fault: optimizer,
    schedule, data position or random numbers not restored; [MASK] started a second time."""
    with monkeypatch.context() as m:
        die_at(m, at)
        assert run(tmp_path) == 130
    assert run(tmp_path, "--resume") == 0
    assert losses(tmp_path) == losses(straight)
    a, b = (load_pretrained(d / "mars").state_dict() for d in (straight, tmp_path))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "mars", "result.json", "sft"]


def test_both_losses_are_logged_and_fall(straight):
    """Fault: one stream not trained, or the stage misnamed."""
    records = losses(straight)
    assert [(r[0], r[1]) for r in records] == [("sft", i) for i in range(1, 6)] + [("mars", i) for i in range(1, 6)]
    assert all(r[2] is None for r in records[:5]) and records[4][3] < records[0][3] and records[9][2] < records[5][2]


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path, monkeypatch):
    """Fault: a kill while writing leaves a folder that --resume trusts."""
    real = torch.save

    def torn(state, path):
        if state["step"] == 4:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        real(state, path)

    monkeypatch.setattr(torch, "save", torn)
    assert run(tmp_path, stages="sft", steps="5") == 130
    assert [p.name for p in train.checkpoints(tmp_path)] == ["sft-step-000002"]
    assert (tmp_path / ".sft-step-000004.tmp" / "trainer_state.pt").read_bytes() == b"half"
    monkeypatch.undo()
    assert run(tmp_path, "--resume", stages="sft", steps="5") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "result.json", "sft"]


def test_only_what_is_ours_is_deleted(tmp_path):
    """Fault: what a user keeps beside a run goes with the leftovers of a kill."""
    theirs = ["mars.old", "sft.old", "mars.tmp", "mars-step-000002.part", ".mars-best.old"]
    ours = [".mars.tmp", ".sft.old", ".mars-step-000002.tmp", ".sft-step-1000000.old"]
    for name in [*theirs, *ours]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("")
    assert run(tmp_path, stages="mars", steps="1") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*theirs, "log.jsonl", "mars", "result.json"])


def test_the_newest_checkpoint_is_the_one_of_the_last_step(tmp_path):
    """Fault: compared as words, step 1,000,000 comes before step 999,999, and mars before sft."""
    for name in ("mars-step-000003", "sft-step-1000000", "sft-step-999999", "sft-step-000007-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.pt").write_text("")
    assert [p.name for p in train.checkpoints(tmp_path)] == ["sft-step-999999", "sft-step-1000000", "mars-step-000003"]


def test_a_damaged_checkpoint_is_named(tmp_path, monkeypatch, capsys):
    """Fault: a traceback of unpickling for a file that a broken disk or a copy cut short."""
    with monkeypatch.context() as m:
        die_at(m, 3)
        run(tmp_path)
    file = tmp_path / "sft-step-000002" / "trainer_state.pt"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"not a checkpoint"):
        file.write_bytes(content)
        assert run(tmp_path, "--resume") == 2 and f"{file}: cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(torch, "load", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    assert run(tmp_path, "--resume") == 2 and "out of memory" in capsys.readouterr().err


def test_resume_after_a_torn_log_line(straight, tmp_path, monkeypatch):
    """Fault: a kill while logging makes the checkpoint useless. The torn line goes, the run ends as the undisturbed one."""
    with monkeypatch.context() as m:
        die_at(m, 3)
        run(tmp_path)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"stage": "sft", "st')
    assert run(tmp_path, "--resume") == 0 and losses(tmp_path) == losses(straight)


def test_resume_refuses_what_would_be_another_run(tmp_path, monkeypatch, capsys):
    """Fault: a resumed run with another lr, silently; an unfinished run overwritten by a fresh one; nothing to resume."""
    assert run(tmp_path, "--resume", stages="sft", steps="5") == 2
    assert "no STAGE-step-NNNNNN checkpoint" in capsys.readouterr().err
    die_at(monkeypatch, 3)
    run(tmp_path, stages="sft", steps="5")
    capsys.readouterr()
    assert run(tmp_path, "--resume", "--lr", "0.5", stages="sft", steps="5") == 2
    assert "lr was {'sft': 0.002}, is {'sft': 0.5}" in capsys.readouterr().err
    assert run(tmp_path, stages="sft", steps="5") == 2
    assert "holds an unfinished run (sft-step-000002)" in capsys.readouterr().err
    monkeypatch.setattr(train, "load_chats", lambda *a: [p.messages() for p in arithmetic("train", 60, seed=9)])
    assert run(tmp_path, "--resume", stages="sft", steps="5") == 2
    assert "data_checksum was" in capsys.readouterr().err


def test_finished_work_is_not_replaced_unasked(straight, tmp_path, capsys):
    """Fault: a second run with other options silently takes the place of the first."""
    before = (straight / "log.jsonl").read_bytes()
    assert run(straight) == 2
    err = capsys.readouterr().err
    assert "sft is of a finished run" in err and "--overwrite" in err and (straight / "log.jsonl").read_bytes() == before
    assert run(tmp_path, stages="sft", steps="1") == 0 and run(tmp_path, "--overwrite", stages="sft", steps="2") == 0
    assert [r[1] for r in losses(tmp_path)] == [1, 2]
    for stages in ("sft,mars", "mars"):  # the other stage, too, has its log here
        assert run(tmp_path, stages=stages, steps="1") == 2 and "sft is of a finished run" in capsys.readouterr().err
        assert run(tmp_path, "--resume", "auto", stages=stages, steps="1") == 2
        assert "other settings: " in (err := capsys.readouterr().err) and "stages was ['sft']" in err
    assert [r[1] for r in losses(tmp_path)] == [1, 2]
    (tmp_path / "sft").rename(tmp_path / "best")  # now only the result tells of it
    assert run(tmp_path, stages="sft", steps="1") == 2 and "result.json is of a finished run" in capsys.readouterr().err
    (tmp_path / "best").rename(tmp_path / "mars")
    for file in ("log.jsonl", "result.json"):
        (tmp_path / file).unlink()  # now nothing does: a model that was copied here
    assert run(tmp_path, "--resume", "auto", stages="mars", steps="1") == 2 and "mars is of a finished run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, "--resume", "auto", "--overwrite")


def test_an_unfinished_run_of_other_stages_is_not_replaced_unasked(tmp_path, monkeypatch, capsys):
    """Fault: of an unfinished sft the log and the checkpoint are lost to `--stages mars`."""
    with monkeypatch.context() as m:
        die_at(m, 3)
        run(tmp_path, stages="sft", steps="5")
    capsys.readouterr()
    assert run(tmp_path, stages="mars", steps="5") == 2 and "unfinished run (sft-step-000002)" in capsys.readouterr().err
    for resume in (["--resume"], ["--resume", "auto"]):
        assert run(tmp_path, *resume, stages="mars", steps="5") == 2 and "stages was ['sft']" in capsys.readouterr().err
    assert run(tmp_path, "--resume", stages="sft", steps="5") == 0 and len(losses(tmp_path)) == 5


def test_a_run_that_left_only_its_log_begins_anew_or_is_refused(straight, tmp_path, monkeypatch, capsys):
    """Fault: with --resume auto, stopped before its first checkpoint, a run cannot begin again, or begins with another lr, silently."""
    with monkeypatch.context() as m:
        die_at(m, 1)
        assert run(tmp_path, "--resume", "auto") == 130
    assert run(tmp_path, "--resume", "auto", "--lr", "0.5") == 2 and "lr was" in capsys.readouterr().err
    assert run(tmp_path, "--resume", "auto") == 0 and losses(tmp_path) == losses(straight)


def test_an_overwritten_run_leaves_no_checkpoint_to_resume(tmp_path, monkeypatch):
    """Fault: the dropped run's later checkpoint outlives the new run's, and --resume continues the wrong one."""
    with monkeypatch.context() as m:
        die_at(m, 5)
        run(tmp_path, stages="sft", steps="9")
    assert [d.name for d in train.checkpoints(tmp_path)] == ["sft-step-000004"]
    with monkeypatch.context() as m:
        die_at(m, 3)
        run(tmp_path, "--overwrite", "--lr", "0.001", stages="sft", steps="9")
    assert [d.name for d in train.checkpoints(tmp_path)] == ["sft-step-000002"]
    assert run(tmp_path, "--resume", "--lr", "0.001", stages="sft", steps="9") == 0


def test_save_every_zero_saves_no_checkpoint(tmp_path, monkeypatch):
    """Fault: 0 = never, and still gigabytes are written between the stages."""
    saved = []
    monkeypatch.setattr(train, "save_checkpoint", lambda *a: saved.append(a))
    assert run(tmp_path, "--save-every", "0", steps="1") == 0 and saved == []
    assert run(tmp_path, "--save-every", "9", "--overwrite", steps="1") == 0 and [s[:2] for s in saved] == [("sft", 1)]


def test_ctrl_c_promises_only_what_is_there(tmp_path, monkeypatch, capsys):
    """Fault: told to --resume when nothing was saved; the finished first stage lost when the second is interrupted early."""
    with monkeypatch.context() as m:
        die_at(m, 1)
        assert run(tmp_path) == 130 and "no checkpoint yet" in capsys.readouterr().err
    with monkeypatch.context() as m:
        die_at(m, 6)
        assert run(tmp_path) == 130 and "sft-step-000005" in capsys.readouterr().err


def test_step_zero_is_the_base_models_own_loss(tokenizer, tmp_path):
    """Fault: the clean stream is not the autoregressive model. Measured before [MASK] is re-initialised."""
    model = tiny_model()
    rows, _ = encode_rows([p.messages() for p in arithmetic("train", 6)], tokenizer, 256)
    with torch.no_grad():
        _, ar = dual_stream_loss(model, build_streams(rows, 4, tokenizer.mask_id))
        own = 0.0
        for r in rows:
            logp = model.logits(model(torch.tensor([r.ids])))[0].log_softmax(-1)
            own -= sum(logp[t - 1, r.ids[t]].item() for start, end in r.spans for t in range(start, end))
    assert abs(ar.item() - own) < 1e-3 * own


def test_mask_starts_as_the_mean_embedding(tokenizer):
    """Fault: padding rows counted in, other rows touched, the tied head left behind."""
    model = tiny_model(vocab_size=600)
    before = model.model.embed_tokens.weight.detach().clone()
    start_mask_embedding(model, tokenizer)
    after = model.lm_head.weight
    assert torch.allclose(after[tokenizer.mask_id], before[: tokenizer.n_tokens].mean(0), atol=1e-6)
    others = torch.arange(600) != tokenizer.mask_id
    assert torch.equal(after[others], before[others])


def test_the_mask_id_is_recorded_and_a_trained_mask_is_kept(straight, tmp_path, capsys):
    """Fault: training on from a MARS checkpoint throws its [MASK] away; the record missing."""
    tokenizer = ChatTokenizer.from_pretrained(straight / "mars")
    assert tokenizer.mars == {"stage": "mars", "block_size": 4, "mask_token_id": tokenizer.mask_id, "mask_token": "<|mask|>"}
    again = ["--init", str(straight / "mars"), "--data", "arithmetic", "--data-size", "60", "--steps", "1", "--lr", "0"]
    assert train.main([*again, "--quiet", "--out", str(tmp_path)]) == 0
    a, b = load_pretrained(straight / "mars"), load_pretrained(tmp_path / "mars")
    assert torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)


@pytest.mark.parametrize("anchor", ["start", "random"])
def test_the_token_budget_changes_memory_not_gradients(tmp_path, tokenizer, anchor):
    """Through the real step. Fault: accumulation that weighs micro-batches instead of tokens; blocks that begin elsewhere when a step
    is split otherwise."""
    rows, _ = encode_rows([p.messages() for p in arithmetic("train", 12)], tokenizer, 256)
    results = []
    for budget in (10**6, 300, 1):
        args = settled(tmp_path, "--micro-tokens", str(budget), "--anchor", anchor)
        torch.manual_seed(0)  # as train_stage does before every step
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        record = train.optimizer_step(model, optimizer, rows, 4, tokenizer.mask_id, args)
        results.append((torch.tensor([record["L_mask"], record["L_AR"], record["grad_norm"]]), model.lm_head.weight.detach()))
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results[0], other))


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_ar_weight(tokenizer, tmp_path, weight):
    """Fault: ar_weight 0 still trains L_AR, or switches its log off. Gradients of the sum are checked against each alone."""
    rows, _ = encode_rows([p.messages() for p in arithmetic("train", 3)], tokenizer, 256)
    args = settled(tmp_path, "--ar-weight", str(weight), "--clip", "1e9")
    model, start = tiny_model(), tiny_model().lm_head.weight.detach()
    record = train.optimizer_step(model, torch.optim.SGD(model.parameters(), lr=1.0), rows, 4, tokenizer.mask_id, args)
    reference = tiny_model()
    mask, ar = dual_stream_loss(reference, build_streams(rows, 4, tokenizer.mask_id))
    n_mask, n_ar = train.count_targets(rows)
    (mask / n_mask + weight * ar / n_ar).backward()
    assert torch.allclose(start - model.lm_head.weight, reference.lm_head.weight.grad, atol=1e-5)
    assert math.isclose(record["L_AR"], ar.item() / n_ar, rel_tol=1e-4)


def test_learning_rate():
    """Fault: warm-up that starts at 0 or never ends; a cosine that does not reach 0; division by zero for one step."""
    rates = [learning_rate(s, 100, 1.0, 0.1) for s in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and rates[100] == pytest.approx(0)
    assert rates[9:] == sorted(rates[9:], reverse=True) and learning_rate(0, 1, 1.0, 0.03) == 1.0


def test_a_diverging_run_stops_with_a_word(tmp_path, capsys):
    """Fault: NaN weights saved as if nothing had happened."""
    assert run(tmp_path, "--lr", "1e30", "--clip", "1e30", stages="sft", steps="5") == 2
    assert "lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "sft").exists()


def test_one_value_for_all_stages_or_one_for_each():
    """Fault: the second stage trained with the first one's options; the tiny model's defaults used for other models or data."""
    both = ["--init", "scratch", "--stages", "sft,mars"]
    assert train.parse([*both, "--lr", "1e-3,2e-4", "--batch-size", "4"]).lr == {"sft": 1e-3, "mars": 2e-4}
    args = train.parse([*both, "--steps", "7,3", "--batch-size", "4,8"])
    assert args.steps == {"sft": 7, "mars": 3} and args.batch_size == {"sft": 4, "mars": 8} and args.data_size == 28
    assert train.parse(both).steps == {stage: of["steps"] for stage, of in train.TINY_STAGES.items()}
    assert train.parse(["--init", "checkpoints/tiny-sft"]).settings == {**train.parse([]).settings, "init": "checkpoints/tiny-sft"}
    assert train.parse([]).steps == {"mars": train.TINY_STAGES["mars"]["steps"]} and train.parse([]).problems == 300
    for argv in (["--epochs", "2"], ["--data-size", "50"], ["--data", "chats.jsonl"]):
        assert train.parse(argv).steps == {"mars": None}  # then the data says how many
    other = train.parse(["--init", "qwen2.5-0.5b"])
    assert (other.data, other.steps, other.problems) == ("gsm8k", {"mars": None}, 0)
    assert (other.batch_size, other.lr) == ({"mars": 16}, {"mars": 5e-5})


# ------------------------------------------------------------------------------------------ never lose work


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_saves_its_step_and_goes_on(straight, tmp_path, monkeypatch, capsys, number, code):
    """Fault: a signal loses what came after the last checkpoint (here all of it), or leaves its handler behind."""
    real, calls, before = train.optimizer_step, [], signal.getsignal(number)

    def step(*args):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(train, "optimizer_step", step)
        assert run(tmp_path, "--save-every", "0") == code
    assert "sft-step-000003" in capsys.readouterr().err and signal.getsignal(number) is before
    assert run(tmp_path, "--save-every", "0", "--resume", "auto") == 0
    assert losses(tmp_path) == losses(straight)


@pytest.mark.parametrize("how", ["signal in the last step", "ctrl-c while scoring"])
def test_a_run_stopped_before_it_was_scored_is_finished(tmp_path, monkeypatch, capsys, how):
    """Fault: a signal in the last step is not heard until minutes of scoring are over; --resume auto trains again what only wants its score."""
    scored, real = [], train.optimizer_step

    def score(folder, *more):
        scored.append(folder)
        if how != "signal in the last step" and len(scored) == 1:
            raise KeyboardInterrupt
        return {"n": 7}

    def step(*args):
        if how == "signal in the last step":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    argv = ["--problems", "7", "--resume", "auto"]
    monkeypatch.setattr(train, "score", score)
    with monkeypatch.context() as m:
        m.setattr(train, "optimizer_step", step)
        assert run(tmp_path, *argv, stages="sft", steps="1") == (143 if how == "signal in the last step" else 130)
    assert "sft is finished" in capsys.readouterr().err and sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "result.json", "sft"]
    result = lambda: json.loads((tmp_path / "result.json").read_text())
    assert "n" not in result()
    scored.clear()
    monkeypatch.setattr(train, "optimizer_step", None)
    with monkeypatch.context() as m:
        m.setattr(train, "score", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(tmp_path, *argv, stages="sft", steps="1") == 130 and "sft is finished" in capsys.readouterr().err
    monkeypatch.setattr(train, "score", lambda folder, *more: scored.append(folder) or {"n": 7})
    for _ in range(2):
        assert run(tmp_path, *argv, stages="sft", steps="1") == 0
    assert scored == [tmp_path / "sft"] and result()["n"] == 7 and result()["L_AR"] > 0


def test_a_run_killed_for_real(tmp_path):
    """Fault: something that only SIGKILL shows: a checkpoint that does not load, another end. `eval.crash` does it ten times."""
    from eval import crash

    result = crash.crash(tmp_path, kills=1, steps=4, seed=0)
    assert all(result["runs_equal"]) and result["n_steps"] == 8 and len(result["kills"]) == 1
    assert result["left_over"] == ["log.jsonl", "mars", "result.json", "sft"]


def test_resume_auto_begins_continues_and_ends(straight, tmp_path, monkeypatch, capsys):
    """Fault: a job script needs two commands, or the one command trains a finished run again."""
    with monkeypatch.context() as m:
        die_at(m, 3)
        assert run(tmp_path, "--resume", "auto") == 130
    assert run(tmp_path, "--resume", "auto") == 0 and losses(tmp_path) == losses(straight)
    monkeypatch.setattr(train, "optimizer_step", None)
    assert run(tmp_path, "--resume", "auto") == 0 and "mars is finished" in capsys.readouterr().out
    assert run(tmp_path, "--resume", "auto", "--lr", "0.5") == 2 and "other settings: lr was" in capsys.readouterr().err
    (tmp_path / "mars-step-000002").mkdir()  # killed while it cleaned up
    (tmp_path / "mars-step-000002" / "trainer_state.pt").write_bytes(b"half")
    (tmp_path / ".mars-step-000001.old").mkdir()
    assert run(tmp_path, "--resume", "auto") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "mars", "result.json", "sft"]


@pytest.mark.parametrize("broken", ["torch.save", "safetensors", "folder"])
def test_a_checkpoint_that_cannot_be_written(straight, tmp_path, monkeypatch, capsys, broken):
    """Fault: a full disk ends in a traceback, leaves half a checkpoint, or has cost the one before. The run can then be resumed."""
    from safetensors import SafetensorError, torch as st

    real_torch, real_st = torch.save, st.save_file
    full = lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device"))

    def fails(real, error, when):
        calls = []

        def save(*args, **more):
            calls.append(1)
            return error() if len(calls) == when else real(*args, **more)

        return save

    with monkeypatch.context() as m:
        if broken == "torch.save":
            m.setattr(torch, "save", fails(real_torch, full, 2))
        elif broken == "safetensors":
            m.setattr(st, "save_file", fails(real_st, lambda: (_ for _ in ()).throw(SafetensorError("I/O error: disk full")), 2))
        else:
            m.setattr(type(tmp_path), "rename", fails(type(tmp_path).rename, full, 2))  # from .tmp to its name
        assert run(tmp_path) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err and "sft-step-000004" in err and "sft-step-000002 is whole" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "sft-step-000002"]
    assert run(tmp_path, "--resume") == 0 and losses(tmp_path) == losses(straight)


def test_a_disk_that_is_really_full(tmp_path):
    """The same with a true limit on the size of files, in a process of its own, from the first checkpoint on."""
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); import train\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); sys.exit(train.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", code, *SMALL, "--steps", "5", "--out", str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "cannot write" in done.stderr and "no checkpoint was written before" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl"] and "Traceback" not in done.stderr


def test_an_output_folder_that_cannot_be_made(tmp_path, capsys):
    """Fault: a traceback for a path that leads through a file."""
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "run", stages="sft", steps="1") == 2
    assert "error: cannot write" in capsys.readouterr().err


def test_held_out_chats_are_watched_and_never_learned(tmp_path, capsys):
    """Fault: the split overlaps the training data, the looks change the run, or are lost or doubled on resume."""
    chats = [p.messages() for p in arithmetic("train", 40)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    seen = []
    real = train.encode_rows

    def spy(rows, *more):
        seen.append([r[0]["content"] for r in rows])
        return real(rows, *more)

    argv = ["--data", str(file), "--val-every", "2"]
    try:
        train.encode_rows = spy
        assert run(tmp_path / "a", *argv, "--val", "4", stages="mars", steps="3") == 0
    finally:
        train.encode_rows = real
    assert seen[0] == [c[0]["content"] for c in chats[:36]] and all(s == [c[0]["content"] for c in chats[36:]] for s in seen[1:])
    looks = [r for r in map(json.loads, (tmp_path / "a" / "log.jsonl").read_text().splitlines()[1:]) if "val" in r]
    assert [(r["stage"], r["step"]) for r in looks] == [("mars", 0), ("mars", 2), ("mars", 3)]
    assert looks[-1]["val"]["L_mask"] < looks[0]["val"]["L_mask"] and looks[-1]["val"]["tokens_per_forward"] >= 1
    file.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats[:36]))
    assert run(tmp_path / "b", "--data", str(file), "--val", "0", stages="mars", steps="3") == 0
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")


def test_looks_are_neither_lost_nor_doubled_on_resume(tmp_path, monkeypatch):
    """Stopped after step 3 with a checkpoint of step 2: the look at step 3 is taken again, once. Fault: two points of one step, or none."""
    looks = lambda out: [r for r in map(json.loads, (out / "log.jsonl").read_text().splitlines()[1:]) if "val" in r]
    argv = ["--val", "3", "--val-every", "1"]
    assert run(tmp_path / "a", *argv, stages="mars", steps="4") == 0
    with monkeypatch.context() as m:
        die_at(m, 3)
        assert run(tmp_path / "b", *argv, stages="mars", steps="4") == 130
    assert [r["step"] for r in looks(tmp_path / "b")] == [0, 1, 2, 3]
    assert run(tmp_path / "b", *argv, "--resume", stages="mars", steps="4") == 0
    assert [r["step"] for r in looks(tmp_path / "a")] == [0, 1, 2, 3, 4] and looks(tmp_path / "a") == looks(tmp_path / "b")


def test_held_out_chats_are_watched_in_bfloat16_too(tmp_path):
    """Fault: under autocast the decoder's cache and its queries have different types, and the look ends the run."""
    assert run(tmp_path, "--dtype", "bfloat16", "--val", "2", stages="mars", steps="1") == 0
    looks = [r["val"] for r in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()[1:]) if "val" in r]
    assert len(looks) == 2 and all(math.isfinite(v["L_mask"]) and v["tokens_per_forward"] >= 1 for v in looks)


def losses_of(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:]]
    return [(r["step"], r["L_mask"], r["L_AR"], r["grad_norm"]) for r in records if "val" not in r]
