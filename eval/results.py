"""What all measuring commands share: how they end, and where a number comes from (command, versions, machine)."""

import functools
import hashlib
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from data import DOWNLOADS, download
from model import UserError, is_out_of_memory, write_text

ROOT = Path(__file__).resolve().parent.parent


def command(main):
    """A command's main, with one line on stderr and an exit code: what a person can put right, files and memory too, 2; Ctrl-C 130."""

    @functools.wraps(main)
    def guarded(argv=None) -> int:
        try:
            return main(argv)
        except (UserError, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            return 2
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            print("error: out of memory. Take a smaller batch, fewer new tokens, or fewer tokens at once", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130

    return guarded


def provenance(device=None, dtype=None, data: str | None = None, seed: int | None = None) -> dict:
    """Command, commit, versions, machine, and the sha256 of the data file."""
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        git = None
    file = download(data) if data in DOWNLOADS else Path(data).expanduser() if data else None
    return {
        "command": shlex.join(["python", "-m", f"eval.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": git.stdout.strip() or None if git else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
        "data_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else None,
    }


def model_sha256(folder: Path) -> str:
    """Of a model's weights, configuration and tokenizer, read one after the other in order of name."""
    total = hashlib.sha256()
    files = [path for kind in ("*.safetensors", "*config.json", "tokenizer.json", "*.jinja") for path in folder.glob(kind)]
    for path in sorted(files):
        with path.open("rb") as file:
            while piece := file.read(2**20):
                total.update(piece)
    return total.hexdigest()


def write_results(path: Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")
