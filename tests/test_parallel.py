"""Two processes against one: gradients, weights, checkpoints, uneven work."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model

import train
from data import arithmetic, encode_rows
from model import load_pretrained, save_pretrained

RUN = "--data arithmetic --data-size 21 --batch-size 5 --lr 2e-3 --device cpu --dtype float32 --quiet --problems 0 --val 3 --json".split()


SCRIPT = """
import sys
import model
model.LOGITS_AT_ONCE = 60 * model.load_pretrained(sys.argv[2]).config.vocab_size  # several chunks, of another number on each rank
import os
import train

real, calls = train.optimizer_step, []

def step(model, optimizer, rows, block_size, mask_id, args):  # the run is asked to stop in the middle of its N-th step
    calls.append(1)
    if args.rank == 1 and str(len(calls)) == os.environ["STOP_AT"]:  # one rank hears of it
        args.signals.append(15)
    return real(model, optimizer, rows, block_size, mask_id, args)

train.optimizer_step = step
sys.exit(train.main())
"""


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "run.py"
    script.write_text(SCRIPT)

    def run(n, *argv, ends_well=True, stop_at=None):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", str(script), *map(str, argv)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "STOP_AT": str(stop_at)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert (done.returncode == 0) == (ends_well and not stop_at), done.stderr[-3000:]
        assert not stop_at or "stopped; the same command with --resume continues" in done.stderr, done.stderr[-3000:]
        return done

    return run


def records(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def start(tmp_path_factory, tokenizer):
    return save_pretrained(tmp_path_factory.mktemp("start") / "model", tiny_model(), tokenizer)  # in bfloat16, as real ones are


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory):
    """sft then mars, one process: 21 chats, 5 a step, so that the last step of an epoch has one; groups of about two chats."""
    out = tmp_path_factory.mktemp("alone")
    assert train.main(["--init", str(start), "--stages", "sft,mars", "--micro-tokens", "400", *RUN, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("how", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_two_ranks_make_the_model_of_one(how, start, alone, tmp_path, torchrun):
    """Faults: a mean over ranks instead of over tokens; a rank without a group of its own that hangs or counts twice; block
    offsets that depend on the rank; [MASK] started on one rank only; a shard saved as if it were the model; gathering once for every
    chunk of logits, of which the ranks have unequally many."""
    torchrun(2, "--init", start, "--stages", "sft,mars", "--micro-tokens", "400", *RUN, *how, "--out", tmp_path / "run")
    for ours, theirs in zip(records(tmp_path / "run"), records(alone), strict=True):
        assert (ours["stage"], ours["step"]) == (theirs["stage"], theirs["step"])
        for key in ("L_AR", "L_mask", "grad_norm", "tokens", "padding"):
            assert ours.get(key) is None or ours[key] == pytest.approx(theirs[key], rel=1e-4), (key, ours, theirs)
        if "val" in ours:
            assert ours["val"]["L_mask_by_mask"] == pytest.approx(theirs["val"]["L_mask_by_mask"], rel=1e-3)
    for stage in ("sft", "mars"):
        a, b = (load_pretrained(out / stage, torch.float32).state_dict() for out in (tmp_path / "run", alone))
        assert all(torch.allclose(a[k], b[k], rtol=0.01, atol=2e-4) for k in a), stage  # saved in bfloat16: one step of it


@pytest.mark.parametrize("how", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_a_step_of_two_ranks_has_the_gradients_of_one(how, start, tokenizer, tmp_path, torchrun):
    """Fault: normalisation by a rank's own tokens, a part of the weights left out of the sum. After one step AdamW's first moment is
    the gradient, clipped, times 1 - beta1."""
    rows, _ = encode_rows([p.messages() for p in arithmetic("train", 5)], tokenizer, 256)
    one = "--stages mars --steps 2 --data-size 5 --batch-size 5 --warmup 0 --clip 1e9 --anchor start --save-every 0".split()
    torchrun(2, "--init", start, *RUN, *one, "--micro-tokens", "300", *how, "--out", tmp_path / "run", stop_at=1)
    args = train.parse(["--init", str(start), *RUN, *one, "--out", str(tmp_path / "one")])
    args.device, args.dtype, args.micro_tokens = torch.device("cpu"), torch.float32, 10**6
    model = load_pretrained(start, torch.float32)
    train.start_mask_embedding(model, tokenizer)
    gradients = []

    class Keep(torch.optim.SGD):
        def step(self):
            gradients.extend(p.grad.clone() for p in model.parameters())

    record = train.optimizer_step(model, Keep(model.parameters(), lr=0.0), rows, 4, tokenizer.mask_id, args)
    state = torch.load(tmp_path / "run" / "mars-step-000001" / "trainer_state.pt", weights_only=True)["optimizer"]["state"]
    for i, gradient in enumerate(gradients):
        assert torch.allclose(state[i]["exp_avg"] / 0.1, gradient, rtol=1e-3, atol=1e-5), i
    assert len(state) == len(gradients) > 30
    [theirs] = [r for r in records(tmp_path / "run") if "L_AR" in r]
    assert [theirs[k] for k in ("L_AR", "L_mask", "grad_norm")] == pytest.approx([record[k] for k in ("L_AR", "L_mask", "grad_norm")], rel=1e-5)


@pytest.mark.parametrize("how", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_a_run_may_go_on_with_another_number_of_ranks(how, start, alone, tmp_path, monkeypatch, torchrun):
    """Steps 1 to 3 alone, 3 again to 6 on two ranks, 7 and 8 on two others, the last two alone. Fault: a checkpoint of two ranks that one or
    two cannot read, or the other way round; AdamW's moments lost on the way."""
    argv = ["--init", str(start), "--stages", "sft,mars", "--micro-tokens", "400", *RUN, "--save-every", "2", "--out", str(tmp_path)]
    real, calls = train.optimizer_step, []

    def step(*args):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(train, "optimizer_step", step)
        assert train.main(argv) == 130
    torchrun(2, *argv, "--resume", *how, stop_at=4)  # from step 2, the newest checkpoint
    torchrun(2, *argv, "--resume", *how, stop_at=2)
    assert [d.name for d in train.checkpoints(tmp_path)] == ["mars-step-000003"]
    assert train.main([*argv, "--resume"]) == 0
    for ours, theirs in zip(records(tmp_path), records(alone), strict=True):
        for key in ("L_AR", "L_mask", "grad_norm"):
            assert ours.get(key) is None or ours[key] == pytest.approx(theirs[key], rel=1e-4), (key, ours, theirs)


def test_a_checkpoint_that_rank_0_cannot_write_ends_all_ranks(start, tmp_path, torchrun):
    """Fault: the other rank waits for ever, or its traceback hides the reason."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".mars-step-000002.tmp").write_text("a file where a folder should be")
    argv = ["--init", start, "--stages", "mars", *RUN, "--save-every", "2", "--overwrite", "--out", tmp_path / "run"]
    done = torchrun(2, *argv, ends_well=False)
    assert "error: cannot write" in done.stderr and "rank 0 cannot write" in done.stderr and "train.py\", line" not in done.stderr


def test_shard_needs_ranks(start, tmp_path, capsys):
    """Fault: --shard without torchrun does nothing and says nothing."""
    assert train.main(["--init", str(start), *RUN, "--shard", "--out", str(tmp_path / "x")]) == 2
    assert "torchrun" in capsys.readouterr().err
