"""The set-up logic of `./run`, without network: a stand-in for Python pretends to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

# Answers what only a real installation could; the rest (hashing, locking) goes to the real interpreter.
STAND_IN = f"""#!/bin/sh
case "$*" in
  *_base_executable*) echo "{VERSION.replace(".", " ")} $0" ;;
  *"import pip"*) echo {VERSION} ;;
  *ensurepip*) exit ${{FAKE_ENSUREPIP:-0}} ;;
  *"-m venv"*)
    echo venv >>"$CALLS"
    for target in "$@"; do :; done
    mkdir -p "$target/bin" "$target/lib/python{VERSION}/site-packages"
    cp "$0" "$target/bin/python" ;;
  *"-m pip"*install*)
    echo install >>"$CALLS"
    sleep "${{FAKE_SECONDS:-0}}"
    echo "a line of the installer"
    exit ${{FAKE_STATUS:-0}} ;;
  *"-m emoe"*) echo "ran $*" ;;
  *"-m ruff"* | *"-m mypy"* | *"-m codespell"* | *"-m pytest"*)
    echo "ran $* with $OMP_NUM_THREADS thread, $PYTHONPATH"
    [ -z "$FAKE_BROKEN" ] || case "$*" in *"$FAKE_BROKEN"*) exit 3 ;; esac ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""


class Tree:
    """A copy of the files `./run` reads, in a folder with an awkward name, and a way to call it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a folder (with spaces)"
        self.root.mkdir()
        for name in ("run", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.venv = self.root / ".venv"
        self.python = folder / "stand-in"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.calls_file = folder / "calls"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("EMOE_") and k != "PYTHONPATH"}
        self.env = kept | {"CALLS": str(self.calls_file), "PYTHON": str(self.python), "EMOE_UV": "0"}

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        command = [str(self.root / "run"), *args]
        pipe = subprocess.PIPE
        folder = self.root.parent  # not the tree itself: ./run must not depend on where it is called
        return subprocess.Popen(command, cwd=folder, env=self.env | env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *args: str, **env: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self, *args: str, **env: str) -> list[str]:
        """What was made or installed by a task, or since the last question."""
        assert not args or self.run(*args, **env)[0] == 0
        lines = self.calls_file.read_text().split() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return lines

    def names(self) -> set[str]:
        return {path.name for path in self.venv.iterdir()}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_unknown_task_lists_the_tasks(tree: Tree) -> None:
    code, _, err = tree.run("dmeo")
    assert code == 2 and "unknown task 'dmeo'" in err
    assert all(f"\n  {task} " in err for task in ("demo", "emoe", "test", "lint", "help"))
    assert tree.run()[0] == 2 and tree.run("help")[0] == 0
    assert not tree.venv.exists()


def test_first_start_sets_up_and_the_next_calls_no_installer(tree: Tree) -> None:
    code, out, err = tree.run("emoe", "show", "two words")
    assert (code, out) == (0, "ran -m emoe show two words\n") and "set up in" in err
    assert tree.calls() == ["venv", "install"]
    assert ".ready-core" in tree.names() and ".busy" not in tree.names()
    assert tree.run("demo", FAKE_STATUS="1") == (0, "ran -m emoe demo\n", "")
    assert tree.calls() == []


def test_the_test_task_adds_to_the_core(tree: Tree) -> None:
    assert tree.calls("demo") == ["venv", "install"]
    code, out, err = tree.run("test", "-k", "routing", OMP_NUM_THREADS="16")
    assert code == 0 and "-k routing with 1 thread" in out and out.rstrip().endswith(str(tree.root / "src")), err
    assert tree.calls() == ["install"]
    assert {".ready-core", ".ready-test"} <= tree.names()
    assert tree.calls("demo") == tree.calls("test") == []


def test_a_failed_install_shows_the_log_and_spares_the_core(tree: Tree) -> None:
    tree.run("demo")
    code, _, err = tree.run("test", FAKE_STATUS="1")
    assert code == 1 and "a line of the installer" in err and "setup.log" in err
    tree.calls()
    assert tree.calls("demo") == [] and tree.calls("test") == ["install"]


def test_a_killed_set_up_is_made_again(tree: Tree) -> None:
    process = tree.start("demo", FAKE_SECONDS="1.5")
    while "install" not in (tree.calls_file.read_text() if tree.calls_file.exists() else ""):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert ".busy" in tree.names() and ".ready-core" not in tree.names()
    tree.calls()
    code, _, err = tree.run("demo")  # waits for the installer that outlived its parent
    assert code == 0 and "waiting" in err and tree.calls() == ["venv", "install"]


def test_two_at_once_install_once(tree: Tree) -> None:
    both = [tree.start("demo", FAKE_SECONDS="0.5") for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["ran -m emoe demo\n"] * 2
    assert tree.calls() == ["venv", "install"]


def test_only_a_change_of_requirements_installs_again(tree: Tree) -> None:
    tree.calls("test")
    with (tree.root / "pyproject.toml").open("a") as project:
        project.write("\n[tool.something]\nkey = 1\n")
    assert tree.calls("test") == []
    with (tree.root / "constraints.txt").open("a") as pins:
        pins.write("some-package==1.0\n")
    assert tree.calls("demo") == ["install"] and ".ready-test" not in tree.names()


def test_a_foreign_folder_is_never_removed(tree: Tree) -> None:
    folder = tree.root.parent / "precious"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    code, _, err = tree.run("demo", EMOE_VENV=str(folder))
    assert code == 1 and "EMOE_VENV" in err and (folder / "thesis.tex").exists()


def test_python_without_venv_names_the_package(tree: Tree) -> None:
    code, _, err = tree.run("demo", FAKE_ENSUREPIP="1")
    assert code == 1 and f"apt install python{VERSION}-venv" in err


def test_old_python_is_refused_and_a_newer_one_found(tree: Tree) -> None:
    folder = tree.root.parent / "bin"
    folder.mkdir()
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        (folder / name).write_text('#!/bin/sh\necho "3 9 $0"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    for system in ("0", "1"):
        code, _, err = tree.run("demo", PYTHON="", PATH=path, EMOE_SYSTEM=system)
        assert code == 1 and "Python 3.11 or newer is needed (python3 is 3.9" in err
    shutil.copy(tree.python, folder / "python3.12")
    assert tree.run("demo", PYTHON="", PATH=path)[:2] == (0, "ran -m emoe demo\n")


def test_system_mode_passes_arguments_and_status(tree: Tree) -> None:
    package = tree.root / "src" / "emoe"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()  # without it the package of the checkout would come first
    (package / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    assert tree.run("emoe", "a b", "*", EMOE_SYSTEM="1", PYTHON=sys.executable)[:2] == (7, "['a b', '*']\n")
    assert not tree.venv.exists()


@pytest.mark.parametrize("broken", ["", "-m mypy", "-m pytest"])
def test_continuous_integration_runs_lint_and_tests_and_fails_with_either(tree: Tree, broken: str) -> None:
    shutil.copytree(ROOT / ".ci", tree.root / ".ci")
    command = [tree.root / ".ci" / "run", "-q"]
    result = subprocess.run(command, env=tree.env | {"FAKE_BROKEN": broken}, capture_output=True, text=True)
    assert result.returncode == bool(broken), result.stderr
    ran = [line.split(" with ")[0] for line in result.stdout.splitlines()]
    tools = ["ruff format --check", "ruff check", "mypy", "codespell_lib"]
    assert ran[:4] == [f"ran -m {tool}" for tool in tools]
    assert len(ran) == 5 and ran[4].startswith("ran -m pytest") and ran[4].endswith("-q")
