"""The README's commands exist, with the flags it shows, and its links point somewhere."""

import re
import shlex

import pytest
from conftest import ROOT

import decode
import train

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()]


def test_the_readme_shows_commands():
    """Fault: the blocks renamed, so that nothing below is checked."""
    for command, least in (("train.py", 3), ("decode.py", 2)):
        assert sum(line.startswith(f"python {command}") for line in LINES) >= least


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python")])
def test_every_command_parses(line):
    """Fault: a flag renamed in the code only."""
    words = shlex.split(line, comments=True)
    if words[1] == "-m" and words[2].startswith("eval."):
        file = ROOT / (words[2].replace(".", "/") + ".py")
        source = file.read_text(encoding="utf-8")
        assert all(f'"{w}"' in source for w in words[3:] if w.startswith("--"))
    elif words[1] == "-m":
        assert words[2] == "pytest"
    else:
        {"train.py": train, "decode.py": decode}[words[1]].parse(words[2:])


def test_every_function_and_file_named_is_there():
    """Fault: the equation table points to a function that was renamed; a results file that was never committed."""
    for module, name in re.findall(r"`(train|decode|model|kvcache|data)\.([A-Za-z_]+)`", README):
        if name != "py":
            assert re.search(rf"^(def|class) {name}\b", (ROOT / f"{module}.py").read_text(encoding="utf-8"), re.MULTILINE), name
    for path in re.findall(r"`((?:results|eval|tests)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path


def test_the_mask_picture_is_the_mask():
    """Fault: a picture that shows another mask than the code's."""
    import torch

    picture = re.search(r"```mask\n(.*?)```", README, re.DOTALL)[1]
    rows = [re.match(r"(?:clean|noisy) \d   ([1.]{8})  ([1.]{8})", line) for line in picture.splitlines()]
    drawn = [[c == "1" for c in m[1] + m[2]] for m in rows if m]
    p = torch.arange(8)
    starts = torch.cat([p * 0, train.block_starts(p, 0, 4)])
    assert drawn == train.mars_mask(torch.cat([p, p]), starts, torch.arange(16) >= 8).tolist()
