"""The guides say what is true: their code runs, their links lead somewhere.

In docs/guides a fenced block takes part if its first line says so:

- `# file: NAME.py` (python): written to that file;
- `# run` (python): run, after the blocks before it and in the same program;
- `# run` (bash): its `emoe` commands are run, in the same program.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [*GUIDES, *sorted((ROOT / "docs" / "decisions").glob("*.md")), ROOT / "docs" / "architecture.md"]
FENCE = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
# A reader's numbers are small, a test's are smaller.
SMALLER = (
    (re.compile(r"(train\.steps\W+)\d+"), r"\g<1>6"),
    (re.compile(r"(samples[ =]+)[\d_]+"), r"\g<1>200"),
)


def _commands(block: str) -> list[list[str]]:
    """The words after `emoe` of each command in a shell block."""
    lines = block.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("emoe") + 1 :] for words in commands if words]


def _program(text: str, folder: Path) -> str:
    """Write the files of a guide and return what is to be run."""
    parts = ["from emoe.cli import main as _emoe"]
    for language, block in FENCE.findall(text):
        head, _, body = block.partition("\n")
        for pattern, replacement in SMALLER:
            body = pattern.sub(replacement, body)
        if head.startswith("# file: "):
            name = head.removeprefix("# file: ")
            assert re.fullmatch(r"[a-z_]+\.py", name), f"not a file name for a guide: {name!r}"
            (folder / name).write_text(body, encoding="utf-8")
        elif head == "# run" and language == "python":
            parts.append(body)
        elif head == "# run":
            parts += [f"assert _emoe({words!r}) == 0, {words!r}" for words in _commands(body)]
    return "\n".join(parts)


def _run(folder: Path, *words: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "EMOE_COMMIT": "a guide",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *words],
        cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_code_of_a_guide_runs(guide: Path, tmp_path: Path) -> None:
    (tmp_path / "the_guide.py").write_text(_program(guide.read_text(encoding="utf-8"), tmp_path), encoding="utf-8")
    _run(tmp_path, "the_guide.py")
    assert list(tmp_path.glob("runs/*")), "a guide without a trained run shows too little"


def test_own_command_line_knows_own_recipes(tmp_path: Path) -> None:
    _program((ROOT / "docs" / "guides" / "new-method.md").read_text(encoding="utf-8"), tmp_path)
    _run(tmp_path, "my_emoe.py", "list", "toy-8modes-clusters")


def test_links_of_the_docs_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)
