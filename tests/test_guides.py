"""The guides say what is true: their code runs, their links lead somewhere.

In docs/guides a fenced block takes part if its first line says so:

- `# file: NAME.py` (python): written to that file;
- `# run` (python): run, in one program with the blocks before it;
- `# run` (bash): its `./run emoe` and `python NAME.py` commands are run, without a new process for each.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emoe import recipes
from emoe.backbones.base import BackboneConfig
from emoe.cli import main
from emoe.domains.base import DomainConfig
from emoe.methods.base import MethodConfig

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [*GUIDES, *sorted((ROOT / "docs" / "decisions").glob("*.md")), ROOT / "docs" / "architecture.md"]
FENCE = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
# A reader's numbers are small, a test's are smaller.
SMALLER = (
    (re.compile(r"(train\.steps\W+)\d+"), r"\g<1>6"),
    (re.compile(r"(samples[ =]+)[\d_]+"), r"\g<1>200"),
    (re.compile(r"^(\./run emoe eval)", re.MULTILINE), r"\g<1> --rows 100"),
)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; kinds, recipes and modules that a guide defines are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EMOE_COMMIT", "guide")
    yield tmp_path
    foreign = {path.stem for path in tmp_path.glob("*.py")}
    registers = [MethodConfig.members, BackboneConfig.members, DomainConfig.members, recipes._RECIPES]
    for register in registers:
        for name in [name for name, made in register.items() if made.__module__ in foreign]:
            del register[name]
    for name in foreign:
        sys.modules.pop(name, None)


def shell(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a shell block."""
    for line in block.replace("\\\n", " ").splitlines():
        match shlex.split(line, comments=True):
            case []:
                continue
            case ["./run", "emoe", *words]:
                code = main(words)
            case ["python", script, *words]:
                monkeypatch.setattr(sys, "argv", [script, *words])
                with pytest.raises(SystemExit) as end:
                    runpy.run_path(script, run_name="__main__")
                code = end.value.code
            case _:
                pytest.fail(f"a guide cannot run {line!r}")
        assert code == 0, f"{line!r} ended with {code}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_code_of_a_guide_runs(guide: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for language, block in FENCE.findall(guide.read_text(encoding="utf-8")):
        head, _, body = block.partition("\n")
        for pattern, replacement in SMALLER:
            body = pattern.sub(replacement, body)
        if head.startswith("# file: "):
            name = head.removeprefix("# file: ")
            assert re.fullmatch(r"[a-z_]+\.py", name), f"not a file name for a guide: {name!r}"
            (workshop / name).write_text(body, encoding="utf-8")
        elif head == "# run" and language == "python":
            exec(compile(body, f"{guide.name}: {body.splitlines()[0]}", "exec"), names)
        elif head == "# run":
            shell(body, monkeypatch)
    assert list(workshop.glob("runs/*/**/experiment.json")), "a guide without a trained run shows too little"


def test_links_of_the_docs_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)
