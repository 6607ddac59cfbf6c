"""Draw a training run: losses, held-out losses of each mask, tokens per forward, and calibration.

    python -m eval.plot out/NAME --out out/NAME/curves.png
"""

import argparse
import json
import sys
from pathlib import Path

from eval.results import command
from model import UserError


def read_log(file: Path) -> tuple[list[dict], list[dict]]:
    """(one record per step, one per look at the held-out chats), each with "at": steps since the start of the run, over all stages."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; name the --out folder of a run")
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # without a last line that is still being written
    try:
        about, *records = map(json.loads, lines)
        about["settings"], [r["stage"] for r in records]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: not a log of train.py") from None
    steps = [r for r in records if "L_AR" in r]
    if not steps:
        raise UserError(f"{file}: no step in it yet")
    lengths: dict[str, int] = {}
    for r in steps:
        lengths[r["stage"]] = max(lengths.get(r["stage"], 0), r["step"])
    before, total = {}, 0
    for stage, n in lengths.items():
        before[stage], total = total, total + n
    looks = [r | r["val"] for r in records if "val" in r]
    for r in [*steps, *looks]:
        r["at"] = before.get(r["stage"], total) + r["step"]
    return steps, looks


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential moving mean that starts without a bias."""
    out, mean, weight = [], 0.0, 0.0
    for v in values:
        mean, weight = keep * mean + (1 - keep) * v, keep * weight + 1 - keep
        out.append(mean / weight)
    return out


def plot(steps: list[dict], looks: list[dict], file: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise UserError("eval.plot: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, panels = plt.subplots(2, 2, figsize=(10, 6.5))
    (losses, by_mask), (rate, calibration) = panels
    for name, colour in (("L_AR", "#555555"), ("L_mask", "#c0392b")):
        rows = [r for r in steps if r[name] is not None]
        x, y = [r["at"] for r in rows], [r[name] for r in rows]
        losses.plot(x, y, color=colour, lw=0.6, alpha=0.3)
        losses.plot(x, smooth(y), color=colour, lw=1.5, label=name)
        seen = [r for r in looks if r[name] is not None and (name == "L_AR" or r["stage"] == "mars")]
        losses.plot([r["at"] for r in seen], [r[name] for r in seen], "o", color=colour, ms=4, label=f"{name}, held out")
    losses.set(title="loss, nats per token", xlabel="step", yscale="log")
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    losses.tick_params(axis="y", which="minor", labelsize=7)
    trained = [r for r in looks if r["stage"] == "mars"]
    if trained:
        B = len(trained[-1]["L_mask_by_mask"])
        for m in range(B):
            shade = plt.cm.Reds(0.35 + 0.6 * m / B)
            points = [(r["at"], r["L_mask_by_mask"][m]) for r in trained if r["L_mask_by_mask"][m] is not None]
            by_mask.plot(*zip(*points), marker="o", ms=3, color=shade, label=f"mask {m + 1}")
        bins = [b for b in trained[-1]["calibration"] if b["n"]]
        calibration.plot([b["confidence"] for b in bins], [b["agreement"] for b in bins], "o-", ms=4, color="#c0392b")
        rows = [r for r in trained if "tokens_per_forward" in r]
        rate.plot([r["at"] for r in rows], [r["tokens_per_forward"] for r in rows], "o-", ms=4, color="#c0392b")
    by_mask.set(title="held-out L_mask of each mask of a block", xlabel="step")
    rate.set(title="tokens per forward at tau 0.95, a few answers", xlabel="step")
    calibration.plot([0, 1], [0, 1], color="#b0b0b0", lw=0.8)
    calibration.set(title="last look: agreement with one token at a time", xlabel="confidence of the mask", xlim=(0, 1), ylim=(0, 1))
    for ax in panels.flat:
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=150)
    plt.close(fig)
    print(f"wrote {file}")


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="DIR|LOG", help="the --out folder of train.py, or its log.jsonl")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="default: curves.png beside the log")
    args = parser.parse_args(argv)
    file = args.run / "log.jsonl" if args.run.is_dir() else args.run
    steps, looks = read_log(file)
    plot(steps, looks, args.out or file.with_name("curves.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
