"""Checkpoints of a run and how it stops: written beside and renamed, pruned, resumed; Ctrl-C and SIGTERM save the step first.

A run is a folder: log.jsonl, STAGE-step-NNNNNN/ (a Hugging Face folder and trainer_state.pt) while it lasts, STAGE/ for every
finished stage. `args` are those of train.py: of them are read out, stages, settings, rank and what a checkpoint must keep.
"""

import json
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from model import UserError, is_out_of_memory, new_folder, write_model, write_text
from parallel import any_rank, optimizer_state, whole_model


def mars_record(stage: str, tokenizer, args) -> dict:
    return {"stage": stage, "block_size": args.block_size, "mask_token_id": tokenizer.mask_id, "mask_token": tokenizer.mask_token}


def save_checkpoint(stage: str, step: int, model, optimizer, tokenizer, args) -> None:
    """out/STAGE-step-NNNNNN: the model as a Hugging Face folder plus trainer_state.pt; whole or not there. Older ones go.

    Raises UserError when it cannot be written; the one before is then still there.
    """
    model, moments = whole_model(model), optimizer_state(optimizer)
    error = None
    if args.rank == 0:
        try:
            write_checkpoint(stage, step, model, moments, tokenizer, args)
        except UserError as e:
            error = e
    if any_rank(error is not None, args):  # the others wait until it is there
        raise error or UserError("rank 0 cannot write the checkpoint")


def write_checkpoint(stage: str, step: int, model, moments: dict, tokenizer, args) -> None:
    dir = args.out / f"{stage}-step-{step:06d}"
    record = mars_record(stage, tokenizer, args)
    state = {"stage": stage, "step": step, "settings": args.settings, "keep_mask": args.keep_mask, "save_dtype": args.save_dtype}
    before = checkpoints(args.out)
    with writing(dir, before), new_folder(dir) as folder:
        write_model(folder, model, tokenizer, record, torch.float32)  # in full: to go on from
        torch.save(state | {"optimizer": moments}, folder / "trainer_state.pt")
    for other in before:
        if other != dir:
            drop(other)


def drop(dir: Path) -> None:
    """Delete a checkpoint; killed in the middle of it, what is left has another name and is never resumed."""
    old = dir.with_name(f".{dir.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(dir.rename(old), ignore_errors=True)  # a network's file system may hold on to a file; the next run deletes it


@contextmanager
def stop_signals(args):
    """While training, Ctrl-C and SIGTERM are noted in args.signals: the step is finished and saved. A second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():  # only there can Python hear signals
        yield
        return

    def note(number, frame):
        if not args.signals:
            args.signals.append(number)
            args.asked = time.monotonic()
            print("\nstopping after this step; once more stops at once", file=sys.stderr, flush=True)
        elif time.monotonic() > args.asked + 3:  # a launcher and the job system may both pass the same signal on
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def writing(what: Path, before: list[Path] = ()):
    """Turns a failure to write `what` (full disk, no permission, ...) into a UserError that says what is still there."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as e:  # of Python, of torch.save, of safetensors
        drop_torn(what.parent)
        left = f"{before[-1]} is whole: the same command with --resume continues it" if before else "no checkpoint was written before"
        raise UserError(f"cannot write {what}: {str(e).splitlines()[0][:200]}. {left}") from None


def drop_torn(out: Path) -> None:
    """Delete what a kill or a full disk left half written or half deleted: see model.new_folder and drop."""
    for torn in out.glob(".*"):
        if re.fullmatch(r"\.(sft|mars)(-step-\d{6,})?\.(tmp|old)", torn.name):
            shutil.rmtree(torn, ignore_errors=True)


def clean_up(out: Path) -> None:
    """Delete all checkpoints, half written ones too: the run is finished, or dropped."""
    for old in checkpoints(out):
        drop(old)
    drop_torn(out)


def checkpoints(out: Path) -> list[Path]:
    """Whole checkpoints to resume from, oldest first."""
    step = lambda d: int(d.name.rpartition("-")[2])
    named = [[d for d in out.glob(f"{s}-step-*") if re.fullmatch(s + r"-step-\d{6,}", d.name)] for s in ("sft", "mars")]
    return [d for of in named for d in sorted(of, key=step) if (d / "trainer_state.pt").is_file()]


def same_settings(before: dict, args, folder: Path) -> None:
    """Raises UserError naming every setting that is not what `folder` was made with."""
    changed = [f"{k} was {v!r}, is {args.settings.get(k)!r}" for k, v in before.items() if args.settings.get(k) != v]
    if changed:
        raise UserError(f"--resume: {folder} was made with other settings: {'; '.join(changed)}. Give those again; "
                        "or --out DIR trains elsewhere, and --overwrite, without --resume, begins anew")


def settings_of_log(out: Path) -> dict:
    """The settings of the run whose log lies in `out`; {} without one."""
    file = out / "log.jsonl"
    try:
        return json.loads(file.read_text(encoding="utf-8").split("\n")[0])["settings"] if file.is_file() else {}
    except (ValueError, KeyError, TypeError):
        return {}


def load_resume(folder: Path, args) -> dict:
    """The trainer's state; the log is cut back to it. Raises UserError when it was made by other settings, or cannot be read."""
    try:  # split over ranks, the moments need not stand in the memory of every one of them
        state = torch.load(folder / "trainer_state.pt", map_location="cpu", weights_only=True, mmap=args.shard)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        if is_out_of_memory(e):
            raise
        why = f"{type(e).__name__} {e}".partition("\n")[0][:100]
        raise UserError(f"{folder / 'trainer_state.pt'}: cannot be read ({why}). If it is damaged, --overwrite begins anew") from None
    same_settings(state["settings"], args, folder)
    if args.rank == 0:
        file = args.out / "log.jsonl"
        reached = (args.stages.index(state["stage"]), state["step"])
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []  # a kill may leave half a line at the end
        records = [json.loads(line) for line in lines]
        records = [r for r in records if "stage" not in r or (args.stages.index(r["stage"]), r["step"]) <= reached]
        write_text(file, "".join(json.dumps(r) + "\n" for r in records))
        drop_torn(args.out)
    print(f"resume  {folder}")
    return state
