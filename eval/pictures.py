"""The README's pictures: the mask, an answer shaded by forward, and the tau curve. Needs matplotlib.

    python -m eval.pictures --model checkpoints/tiny-mars --results results/tiny.json --out pictures
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

from data import ChatTokenizer
from decode import SAMPLE, StreamDecoder, generate
from eval.results import command
from model import UserError, load_pretrained, read_json
from train import block_starts, mars_mask

BLUES = (None, "#ffffff", "#cfe3f6", "#8fc0ea", "#4f97d6", "#1f6fb8")  # paper of a forward of 1, 2, 3, 4, 5 and more tokens


def draw_mask(plt, path: Path, prompt: int = 4, answer: int = 8, block_size: int = 4) -> None:
    """Figure 2 of the paper for a prompt of 4 tokens and an answer of 8: who (row) may see whom (column)."""
    p = torch.arange(prompt, prompt + answer)
    positions = torch.cat([torch.arange(prompt + answer), p])
    starts = torch.cat([torch.zeros(prompt + answer, dtype=torch.long), block_starts(p, prompt, block_size)])
    noisy = torch.arange(len(positions)) >= prompt + answer
    kind = 1 + noisy[:, None].long() + (noisy[:, None] & noisy[None]).long()  # 1 clean->clean, 2 noisy->clean, 3 noisy->noisy
    shown = torch.where(mars_mask(positions, starts, noisy), kind, 0)
    colours = ["#f2f2f2", "#7f8c9b", "#4f97d6", "#e8923c"]
    names = [f"{'x' if i < prompt + answer else 'M'}{t}" for i, t in enumerate(positions.tolist())]
    fig, ax = plt.subplots(figsize=(7.2, 7.2))
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    T = len(positions)
    ax.imshow(shown.numpy(), cmap=ListedColormap(colours), vmin=0, vmax=3)
    ax.set_xticks(range(T), names, fontsize=8)
    ax.set_yticks(range(T), names, fontsize=8)
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.set_xticks([i - 0.5 for i in range(T + 1)], minor=True)
    ax.set_yticks([i - 0.5 for i in range(T + 1)], minor=True)
    ax.grid(which="minor", color="white", linewidth=1.5)
    ax.tick_params(which="minor", length=0)
    for at in (prompt - 0.5, prompt + answer - 0.5):
        ax.axhline(at, color="black", linewidth=1.2 if at > prompt else 0.6)
        ax.axvline(at, color="black", linewidth=1.2 if at > prompt else 0.6)
    for side in ax.spines.values():
        side.set_visible(False)
    labels = ("clean sees clean: causal", "a mask sees clean: only before its block", "a mask sees masks: its own block, causal")
    ax.legend([Patch(color=c) for c in colours[1:]], labels, loc="upper center", bbox_to_anchor=(0.5, -0.01), frameon=False, fontsize=9)
    ax.set_title(f"prompt of {prompt}, answer of {answer}, B = {block_size}: row = who looks", fontsize=10, pad=12)
    fig.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(fig)


def draw_shaded(plt, path: Path, rows: list[tuple[str, list]]) -> None:
    """Answers on a grid of characters, the tokens of one forward on one paper, darker for more. rows: (title, [(text, n)])."""
    height = sum(2 + "".join(t for t, _ in parts).count("\n") + 1 for _, parts in rows)
    width = max(max(map(len, "".join(t for t, _ in parts).split("\n"))) for _, parts in rows)
    width = max(width, *(len(title) for title, _ in rows))
    fig = plt.figure(figsize=(0.115 * (width + 2), 0.24 * (height + 0.5)))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set_xlim(-1, width + 1)
    ax.set_ylim(height, -0.5)
    ax.axis("off")
    y = 0
    for title, parts in rows:
        ax.text(0, y + 0.5, title, fontsize=11, fontweight="bold", va="center", family="monospace")
        x, y = 0, y + 1
        for text, n in parts:
            for line, piece in enumerate(text.split("\n")):
                if line:
                    x, y = 0, y + 1
                if piece and n > 1:
                    paper = BLUES[min(n, 5)]
                    ax.add_patch(plt.Rectangle((x + 0.06, y + 0.08), len(piece) - 0.12, 0.84, facecolor=paper, edgecolor="none"))
                for i, char in enumerate(piece):
                    ax.text(x + i + 0.5, y + 0.5, char, fontsize=11.5, family="monospace", ha="center", va="center",
                            color="white" if n >= 4 else "black")
                x += len(piece)
        y += 2
    fig.savefig(path, dpi=150, facecolor="white")
    plt.close(fig)


def draw_curve(plt, path: Path, result: dict) -> None:
    """Accuracy against tokens per forward, one point per tau, from a results file of eval.quick."""
    rows = list(result["mars"].values())
    fig, ax = plt.subplots(figsize=(6.4, 3.8))
    x, y = [r["tokens_per_forward"] for r in rows], [100 * r["accuracy"] for r in rows]
    spread = [[100 * (r["accuracy"] - r["low"]) for r in rows], [100 * (r["high"] - r["accuracy"]) for r in rows]]
    ax.errorbar(x, y, yerr=spread, marker="o", color="#1f6fb8", ecolor="#8fc0ea", capsize=3, label="MARS")
    for r, a, b in zip(rows, x, y):
        ax.annotate(f"tau {r['tau']:g}", (a, b), textcoords="offset points", xytext=(6, 7), fontsize=8)
    sft = result["sft"]
    ax.plot([sft["tokens_per_forward"]], [100 * sft["accuracy"]], marker="s", color="#e8923c", linestyle="none", label="before MARS")
    ax.set_xlabel("tokens per forward")
    ax.set_ylabel(f"right, % of {result['n']} unseen problems")
    ax.legend(frameon=False, loc="lower left")
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(fig)


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--prompt", default=SAMPLE, metavar="TEXT")
    parser.add_argument("--tau", type=float, default=0.9)
    parser.add_argument("--results", default=None, metavar="FILE", help="results file of eval.quick, for the tau curve")
    parser.add_argument("--out", type=Path, default=Path("pictures"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    warnings.filterwarnings("ignore", message="Glyph")  # a character the font lacks is drawn as a box
    import matplotlib.pyplot as plt

    result = read_json(Path(args.results)) if args.results else None
    if args.results and "mars" not in result:
        raise UserError(f"--results {args.results}: not a results file of eval.quick")
    model, tokenizer = load_pretrained(args.model, torch.float32), ChatTokenizer.from_pretrained(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for tau in (1.0, args.tau):
        [g] = generate(model, tokenizer, [args.prompt], tau)
        stream, ids = StreamDecoder(tokenizer), iter(g.ids)
        parts = [(stream.add([next(ids) for _ in range(n)]), n) for n in g.accepted]
        rows.append((f"tau {tau:g}: {len(g.ids)} tokens in {g.n_forward} forwards", parts))
    draw_mask(plt, args.out / "mask.png")
    draw_shaded(plt, args.out / "shaded.png", rows)
    if result:
        draw_curve(plt, args.out / "curve.png", result)
    print(f"wrote {', '.join(f'{args.out}/{name}.png' for name in ('mask', 'shaded', *(['curve'] if result else [])))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
