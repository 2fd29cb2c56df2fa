"""The command line: what works, what is refused with which words, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import emoe
from emoe import cli, commands
from emoe.cli import COMMANDS, main
from emoe.config import allowed_range, paths
from emoe.engine.trainer import NumericFailure
from emoe.experiment import Experiment
from emoe.recipes import all_recipes, get_recipe

METHODS = ("mdlm", "vadd", "emoe")
TINY = (
    "--train.steps 20 --train.batch 16 --train.log-every 5 --backbone.width 8 --backbone.hidden 16 --backbone.heads 2 "
    "--backbone.time-size 8 --eval.nfe 1,2 --eval.samples 200 --eval.batch 150 --quiet --device cpu"
).split()
SOURCE = str(Path(emoe.__file__).parents[1])

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def emoe_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 rows of 3 symbols 0..4, in a folder whose name has a space and an umlaut."""
    path = tmp_path_factory.mktemp("my däta") / "rows.npy"
    np.save(path, np.random.default_rng(0).integers(5, size=(200, 3)))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> dict[str, Path]:
    """A tiny run of every method on both domains."""
    runs = {}
    for method in METHODS:
        for recipe, words in (
            (f"toy-8modes-{method}", ["--domain.points", "500"]),
            (f"rows-{method}", ["--domain.path", str(rows_file)]),
        ):
            runs[recipe] = tmp_path_factory.mktemp("runs") / recipe
            assert main(["train", recipe, "--run", str(runs[recipe]), *words, *TINY]) == 0
    return runs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A real process."""
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120, **options
    )  # type: ignore[call-overload, no-any-return]


def test_help_is_fast_and_imports_nothing_heavy(emoe_command: Command) -> None:
    code, out, err = emoe_command("--help")
    assert code == 0 and not err and all(name in out for name in COMMANDS)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        assert shell("-m", "emoe", "--help").stdout == out
        took.append(time.perf_counter() - began)
    assert min(took) < 0.5
    script = (
        "import sys; from emoe.cli import main\n"
        "for words in '--help', '--version', 'trainn', 'train --help', 'sample x --nfe 0': main(words.split())\n"
        "sys.exit(bool({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = shell("-c", script)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "did you mean 'train'?" in done.stderr and "nfe: must be >= 1" in done.stderr


def test_version_and_bare_command(emoe_command: Command) -> None:
    assert emoe_command("--version")[:2] == (0, f"emoe {emoe.__version__}\n")
    assert emoe_command()[:2] == emoe_command("--help")[:2]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, emoe_command: Command) -> None:
    code, out, err = emoe_command(command, "--help")
    assert code == 0 and f"usage: emoe {command}" in out and not err
    if command not in ("sweep", "demo", "release"):
        assert re.search(rf"^examples:\n  emoe {command}\b", out, re.MULTILINE)


def test_list(emoe_command: Command) -> None:
    code, out, _ = emoe_command("list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == sorted(all_recipes())
    code, out, _ = emoe_command("list", "--json")
    assert code == 0 and set(json.loads(out)) == set(all_recipes()) and all(json.loads(out).values())
    code, out, _ = emoe_command("list", "rows-vadd", "--json")
    assert code == 0 and json.loads(out)["method"]["kind"] == "vadd"


@pytest.mark.parametrize("recipe", ["toy-8modes-emoe", "toy-swissroll-vadd", "rows-mdlm"])
def test_train_help_lists_every_field_with_its_range(recipe: str, emoe_command: Command) -> None:
    code, out, err = emoe_command("train", recipe, "--help")
    assert code == 0 and not err and not Path("runs").exists()
    lines = out.splitlines()
    for path, _, field, value in paths(get_recipe(recipe)):
        flag = f"  --{path.replace('_', '-')} {commands.as_typed(value)}"
        meaning = lines[lines.index(flag) + 1]
        assert field.metadata["doc"] in meaning and allowed_range(field.metadata) in meaning
    assert "  --method.schedule linear" in lines and "(" not in next(line for line in lines if "eval.nfe" in line)
    assert emoe_command("list", recipe)[1] in out


def test_train_help_shows_the_fields_of_the_chosen_kind(emoe_command: Command) -> None:
    _, out, _ = emoe_command("train", "toy-8modes-emoe", "--method", "vadd", "--method.latent", 3, "-h")
    assert "  --method.latent 3" in out and "--method.experts" not in out


REFUSED = {
    "command": ("trainn toy-8modes-emoe", ["no command 'trainn'", "did you mean 'train'?"]),
    "recipe": ("train toy-8modes-emo", ["recipe: 'toy-8modes-emo'", "did you mean 'toy-8modes-emoe'?"]),
    "recipe of list": ("list toy-8mode-emoe", ["recipe: ", "did you mean 'toy-8modes-emoe'?"]),
    "no recipe": ("train", ["arguments are required: recipe", "emoe train --help"]),
    "field": ("train toy-8modes-emoe --method.topk 2", ["method.topk: no such field", "did you mean 'method.top-k'?"]),
    "group": ("train toy-8modes-emoe --trainn.steps 2", ["trainn.steps: ", "did you mean 'train.steps'?"]),
    "field without group": ("train toy-8modes-emoe --steps 2", ["'--steps'", "did you mean 'train.steps'?"]),
    "flag": ("train toy-8modes-emoe --reusme", ["'--reusme'", "did you mean 'resume'?"]),
    "flag cut short": ("train toy-8modes-emoe --res", ["'--res'"]),
    "flag of eval": ("eval x --nfes 2", ["'--nfes'", "did you mean 'nfe'?"]),
    "word too many": ("train toy-8modes-emoe runs/a", ["unknown argument 'runs/a'"]),
    "kind": ("train toy-8modes-emoe --method emo", ["method.kind: 'emo' is not known", "did you mean 'emoe'?"]),
    "choice": ("train toy-8modes-emoe --domain.density 8mode", ["domain.density: ", "did you mean '8-modes'?"]),
    "wrong type": ("train toy-8modes-emoe --train.steps ten", ["train.steps: expected whole number >= 1, got 'ten'"]),
    "fraction": ("train toy-8modes-emoe --train.steps 2.5", ["train.steps: expected whole number >= 1, got '2.5'"]),
    "range": ("train toy-8modes-emoe --train.steps 0", ["train.steps: must be >= 1, got 0"]),
    "negative": ("train toy-8modes-emoe --optim.lr -1e-3", ["optim.lr: must be > 0, got -0.001"]),
    "not a number": ("train toy-8modes-emoe --optim.lr nan", ["optim.lr: must be > 0, got nan"]),
    "upper end": ("train toy-8modes-emoe --train.ema 1", ["train.ema: must be >= 0 and <= 0.999999, got 1.0"]),
    "seed": ("train toy-8modes-emoe --seed -1", ["seed: must be >= 0, got -1"]),
    "top-k over E": ("train toy-8modes-emoe --method.top-k 9", ["method.top_k: must be in 1..experts = 8, got 9"]),
    "top-k over E = 1": (
        "train toy-8modes-emoe --method.experts 1",
        ["method.top_k: must be in 1..experts = 1, got 2"],
    ),
    "relax_tau 0": ("train toy-8modes-emoe --method.relax-tau 0", ["method.relax_tau: must be > 0, got 0.0"]),
    "relax_tau nan": ("train toy-8modes-emoe --method.relax-tau nan", ["method.relax_tau.value: must be a finite"]),
    "half a ramp": ("train toy-8modes-emoe --method.relax-tau linear", ["relax_tau.start: missing", "relax_tau.end: "]),
    "broken JSON": ('train toy-8modes-emoe --method.relax-tau {"kind"', ["method.relax_tau: not valid JSON"]),
    "heads": ("train toy-8modes-emoe --backbone.heads 3", ["backbone.heads: must divide width = 128, got 3"]),
    "what the method lacks": (
        "train toy-8modes-mdlm --method.top-k 2",
        ["method.top-k: no such field", "method.t-low"],
    ),
    "no NFE": ("train toy-8modes-emoe --eval.nfe=", ["eval.nfe: must hold at least one number"]),
    "NFE 0 in a recipe": ("train toy-8modes-emoe --eval.nfe 1,0", ["eval.nfe: must be >= 1, got 0"]),
    "no value": ("train toy-8modes-emoe --train.steps", ["train.steps: a value is missing", "--train.steps VALUE"]),
    "flag for a value": ("train toy-8modes-emoe --train.steps --quiet", ["train.steps: a value is missing"]),
    "no value for a flag": ("train toy-8modes-emoe --run", ["--run: expected one argument"]),
    "device": (
        "train toy-8modes-emoe --device gpu",
        ["device: 'gpu' is not known", "allowed: auto, cpu, cuda, cuda:N"],
    ),
    "device of torch": ("train toy-8modes-emoe --device meta", ["device: 'meta' is not known"]),
    "device at sampling": ("sample x --device gpu", ["device: 'gpu' is not known"]),
    "NFE 0": ("sample x --nfe 0", ["nfe: must be >= 1 and <= 10000, got 0"]),
    "NFE 0 of eval": ("eval x --nfe 1,0", ["nfe: must be >= 1 and <= 10000, got 1,0"]),
    "NFE too large": ("sample x --nfe 10001", ["nfe: must be >= 1 and <= 10000, got 10001"]),
    "NFE of another type": ("sample x --nfe one", ["nfe: expected whole numbers >= 1 and <= 10000, got 'one'"]),
    "two NFEs to sample": ("sample x --nfe 1,2", ["nfe: expected one whole number >= 1 and <= 10000, got '1,2'"]),
    "no rows": ("sample x --n 0", ["n: must be >= 1 and <= 10000000, got 0"]),
    "one sample": ("eval x --samples 1", ["samples: must be >= 2 and <= 10000000, got 1"]),
    "seed of a draw": ("sample x --seed -1", ["seed: must be >= 0"]),
    "seed of an evaluation": ("eval x --seed x", ["seed: expected whole numbers >= 0"]),
    "no run folder": ("sample x", ["run: x is no run folder", "emoe train RECIPE"]),
    "no run folder to measure": ("eval x y", ["run: x is no run folder"]),
    "study": ("reproduce toyy", ["study: 'toyy' is not known", "did you mean 'toy'?"]),
    "method of a study": ("reproduce toy --methods emo", ["did you mean 'toy-8modes-emoe'?"]),
    "density of a study": ("reproduce toy --densities 9-modes", ["densities: '9-modes'", "8-modes, swiss-roll"]),
    "seeds of a study": ("reproduce toy --seeds one", ["seeds: expected whole numbers >= 0"]),
    "field of a study": ("reproduce toy --train.stps 5", ["train.stps: ", "did you mean 'train.steps'?"]),
    "field of the demo": ("demo --train.stps 5", ["train.stps: ", "did you mean 'train.steps'?"]),
    "data of a study without": ("reproduce toy --data-root x", ["data-root: 'toy' needs no data files"]),
    "data of a recipe without": (
        "train toy-8modes-emoe --data-root x",
        ["data-root: the data of this run come from no such folder"],
    ),
    "what is kept of nothing": ("sample x --keep 0", ["keep: says what is done with given rows; add --given FILE"]),
    "data": ("data minst", ["data: 'minst' is not known", "did you mean 'mnist'?"]),
    "results": ("report none.json", ["results: none.json does not exist", "emoe reproduce toy"]),
}


@pytest.mark.parametrize(("words", "fragments"), REFUSED.values(), ids=REFUSED)
def test_refused(words: str, fragments: list[str], emoe_command: Command, empty_folder: Path) -> None:
    code, out, err = emoe_command(*words.split())
    assert code == 2 and not out
    assert all(fragment in err for fragment in fragments), err
    assert "Traceback" not in err and all(line.startswith("emoe") for line in err.splitlines())
    assert list(empty_folder.iterdir()) == []  # nothing is begun before everything is checked


def test_all_problems_are_told_at_once(emoe_command: Command) -> None:
    _, _, err = emoe_command("train", "toy-8modes-emoe", "--train.steps", 0, "--optim.lr=x", "backbone.heads=3")
    assert [line.split(": ")[1] for line in err.splitlines()] == ["backbone.heads", "optim.lr", "train.steps"]


def test_data_that_cannot_be_used(emoe_command: Command, empty_folder: Path) -> None:
    code, out, err = emoe_command("train", "rows-emoe")
    assert code == 3 and not out and "domain.path: give the file to train on" in err and err.count("\n") == 1
    np.save("real.npy", np.array([[0.5, 1.0], [1.0, 0.0]]))
    Path("ragged.csv").write_text("0,1\n1\n")
    Path("cut.npy").write_bytes(Path("real.npy").read_bytes()[:-3])
    for name, fragment in {
        "none.npy": "does not exist",
        "real.npy": "row 0, column 0 (counted from 0) holds 0.5, not a whole number",
        "ragged.csv": "line 2 has 1 values, but line 1 has 2",
        "cut.npy": "damaged or cut off",
    }.items():
        code, out, err = emoe_command("train", "rows-emoe", "--domain.path", name)
        assert code == 3 and not out and f"emoe train: {name}: " in err and fragment in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written(emoe_command: Command, trained: dict[str, Path]) -> None:
    Path("file").write_text("")
    for folder in ("file", "file/run"):
        code, out, err = emoe_command("train", "toy-8modes-mdlm", "--run", folder, *TINY)
        assert code == 5 and not out and err.startswith("emoe train: file") and err.count("\n") == 1
    run = trained["toy-8modes-mdlm"]
    code, out, err = emoe_command("sample", run, "--out", "none/x.npy")
    assert code == 5 and not out and err.startswith("emoe sample: none/x.npy: No such file") and err.count("\n") == 1
    code, _, err = emoe_command("eval", run, "--results", "file/results.json")
    assert code == 5 and err.startswith("emoe eval: file") and err.count("\n") == 1


@pytest.mark.parametrize("domain", ["toy-8modes", "rows"])
@pytest.mark.parametrize("method", METHODS)
def test_train_sample_eval(domain: str, method: str, trained: dict[str, Path], emoe_command: Command) -> None:
    run = trained[f"{domain}-{method}"]
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged == [5, 10, 15, 20]

    code, out, err = emoe_command("sample", run, "--n", 7, "--nfe", 2, "--json")
    drawn = json.loads(out)
    length, symbols = (2, 50) if domain == "toy-8modes" else (3, 5)
    assert code == 0 and drawn["nfe"] == 2 and np.shape(drawn["samples"]) == (7, length)
    assert 0 <= np.min(drawn["samples"]) and np.max(drawn["samples"]) < symbols
    assert emoe_command("sample", run, "--n", 7, "--nfe", 2, "--json")[1] == out
    assert emoe_command("sample", run, "--n", 7, "--nfe", 2, "--json", "--seed", 1)[1] != out
    plain = emoe_command("sample", run, "--n", 7, "--nfe", 2)[1]
    assert [[int(word) for word in line.split()] for line in plain.splitlines()] == drawn["samples"]

    code, out, err = emoe_command("eval", run, "--json", "--likelihood", "none")
    rows = json.loads(out)
    metrics = {"validity", "overlap"} | ({"pair_overlap"} if domain == "rows" else set())
    assert code == 0 and {(row["metric"], row["nfe"]) for row in rows} == {(m, n) for m in metrics for n in (1, 2)}
    assert all(row["method"] == method and 0 <= row["value"] <= 100 for row in rows)
    words = ["--nfe", 1, "--samples", 50, "--rows", 40, "--likelihood", "objective bound@2 iw@2,3"]
    rows = [row for row in json.loads(emoe_command("eval", run, *words, "--json")[1]) if row["convention"]]
    units = {(row["metric"], row["convention"]) for row in rows}
    assert units == {(m, c) for m in ("nll", "bpd", "ppl") for c in ("objective", "bound@2", "iw@2,3")}
    assert all(row["nfe"] is None and row["n"] == 40 and row["stderr"] > 0 for row in rows)
    code, out, _ = emoe_command("eval", run, *words)  # tables, without --json: nothing unnamed, nothing unexplained
    assert code == 0 and "not a bound" in out and "bounds the NLL of the 2-step sampler" in out


def test_rows_recipes_take_size_and_length_from_the_file(trained: dict[str, Path], rows_file: Path) -> None:
    run = emoe.load_run(str(trained["rows-emoe"]), device="cpu")
    assert (run.domain.space.size, run.domain.space.mask_id, run.domain.space.length) == (6, 5, 3)
    assert run.experiment.domain == Experiment.load(trained["rows-emoe"] / "experiment.json").domain
    assert json.loads((trained["rows-emoe"] / "experiment.json").read_bytes())["domain"]["path"] == str(rows_file)


def test_samples_as_a_file(trained: dict[str, Path], emoe_command: Command) -> None:
    run = trained["rows-vadd"]
    code, out, err = emoe_command("sample", run, "--n", 9, "--out", "x.npy")
    assert code == 0 and not out and "x.npy: 9 rows" in err
    assert np.load("x.npy").shape == (9, 3)
    code, out, _ = emoe_command("sample", run, "--n", 9, "--out", "y", "--json", "--picture", "y.png")
    assert code == 0 and json.loads(out) == {"nfe": 1, "out": "y.npy"}
    assert (np.load("y.npy") == np.load("x.npy")).all() and Path("y.png").stat().st_size > 1000


def test_greedy_routes_at_sampling(trained: dict[str, Path], emoe_command: Command) -> None:
    run = trained["toy-8modes-emoe"]
    before = (run / "experiment.json").read_bytes()
    drawn = {
        tau: emoe_command("sample", run, "--n", 200, "--json", *(["--method.route-tau", tau] if tau else []))
        for tau in ("", "1", "0")
    }
    assert all(code == 0 for code, _, _ in drawn.values())
    assert drawn[""][1] == drawn["1"][1] != drawn["0"][1]
    assert (run / "experiment.json").read_bytes() == before
    code, _, err = emoe_command("sample", run, "--method.route-tau", "-1")
    assert code == 2 and "method.route_tau: must be >= 0, got -1.0" in err
    code, _, err = emoe_command("sample", trained["toy-8modes-mdlm"], "--method.route-tau", "0")
    assert code == 2 and "method.route-tau: no such field" in err


def test_fields_that_do_not_fit_the_weights(trained: dict[str, Path], emoe_command: Command) -> None:
    code, out, err = emoe_command("sample", trained["toy-8modes-emoe"], "--backbone.width", 16)
    assert code == 2 and not out and "do not fit" in err and "size mismatch" in err and err.count("\n") <= 6
    np.save("longer.npy", np.arange(40).reshape(10, 4))
    code, _, err = emoe_command("eval", trained["rows-emoe"], "--domain.path", "longer.npy")
    assert code == 2 and "domain: the data have" in err and "length=4" in err and "length=3" in err


def test_evaluation_is_recorded(trained: dict[str, Path], emoe_command: Command) -> None:
    runs, plain = [trained["toy-8modes-mdlm"], trained["toy-8modes-emoe"]], ["--likelihood", "none"]
    code, out, _ = emoe_command(
        "eval", *runs, "--nfe", 1, "--samples", 100, "--results", "new/r.json", "--json", *plain
    )
    assert code == 0
    file = json.loads(Path("new/r.json").read_text())
    assert file["rows"] == json.loads(out) and {row["method"] for row in file["rows"]} == {"mdlm", "emoe"}
    assert all((run / "eval.json").exists() for run in runs)
    words = ["--nfe", 1, "--samples", 100, "--results", "new/r.json", "--json", *plain]
    code, out, _ = emoe_command("eval", runs[1], "--method.route-tau", 0, "--eval.batch", 50, *words)
    (recipe,) = {row["recipe"] for row in json.loads(out)}
    assert recipe.startswith("toy-8modes-emoe ") and "train.steps=20" in recipe and "method.route-tau=0" in recipe
    merged = json.loads(Path("new/r.json").read_text())["rows"]  # the ablation replaces nothing
    assert [row for row in merged if "route-tau" not in row["recipe"]] == file["rows"] and len(merged) == 6
    code, out, err = emoe_command("report", "new/r.json", "--run", runs[0], "--out", "report.html")
    assert code == 0 and out == "report.html\n" and "<html" in Path("report.html").read_text(encoding="utf-8")


def test_results_files_that_are_something_else(trained: dict[str, Path], emoe_command: Command) -> None:
    Path("other.json").write_text('{"rows": []}')
    Path("broken.json").write_text("{")
    run = trained["toy-8modes-mdlm"]
    for name in ("other.json", "broken.json"):
        for words in (["report", name], ["eval", run, "--results", name]):
            code, out, err = emoe_command(*words)
            assert code == 2 and not out and f"{name}: " in err and err.count("\n") == 1
    code, _, err = emoe_command("report", "other.json", "--run", "nowhere", "--picture", "none.png")
    assert code == 2 and "picture: none.png does not exist" in err and "run: nowhere is no run folder" in err


def test_a_used_folder_and_another_experiment(trained: dict[str, Path], emoe_command: Command) -> None:
    run, words = trained["toy-8modes-emoe"], ["train", "toy-8modes-emoe", "--domain.points", "500", *TINY]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = emoe_command(*words, "--run", run)
    assert code == 2 and not out and "already holds a trained run; add --resume" in err
    code, out, err = emoe_command(*words, "--run", run, "--resume", "--seed", 3, "--train.batch", 8, "--method.top-k=1")
    assert code == 2 and not out
    assert [line.split(": ", 1)[1].strip() for line in err.splitlines()[1:4]] == [
        "method.top_k: 2 -> 1",
        "seed: 0 -> 3",
        "train.batch: 16 -> 8",
    ]
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, _ = emoe_command(*words, "--run", run, "--resume", "--json")
    assert code == 0 and json.loads(out) | {"seconds": 0} == {"run": str(run), "step": 20, "steps": 20, "seconds": 0}


def test_data_that_changed_since_the_run_began(tmp_path: Path, emoe_command: Command) -> None:
    rows = np.arange(60).reshape(30, 2) % 6
    np.save("rows.npy", rows)
    words = ["train", "rows-mdlm", "--run", "r", "--domain.path", "rows.npy", *TINY]
    assert emoe_command(*words)[0] == 0
    rows[:, 0] = rows[::-1, 0]
    np.save("rows.npy", rows)
    code, _, err = emoe_command(*words, "--resume")
    assert code == 2 and "the training rows are not those" in err


def test_folders_that_are_not_whole(emoe_command: Command) -> None:
    words = ["train", "toy-8modes-mdlm", "--domain.points", "500", "--run", "r", *TINY]
    assert emoe_command(*words)[0] == 0
    saved = Path("r/experiment.json").read_text()
    for text, fragment in {
        "": "not readable as JSON",
        saved[:-20]: "not readable as JSON",
        "[]": "does not hold an experiment",
        saved.replace('"schema": 2', '"schema": 99'): "schema 99 is not known to this version",
        saved.replace('"seed": 0', '"sead": 0'): "sead: unknown field of Experiment; did you mean 'seed'?",
        saved.replace('"mdlm"', '"mdlmm"', 1).replace('"kind": "mdlm"', '"kind": "mdlmm"'): "did you mean 'mdlm'?",
    }.items():
        Path("r/experiment.json").write_text(text)
        for command in (["sample", "r"], [*words, "--resume"]):
            code, out, err = emoe_command(*command)
            assert code == 2 and not out and "r/experiment.json: " in err and fragment in err, err
    Path("r/experiment.json").unlink()
    code, _, err = emoe_command(*words, "--resume")
    assert code == 2 and "has checkpoints but no experiment.json" in err
    Path("r/experiment.json").write_text(saved)
    Path("r/checkpoints").rename("r/elsewhere")
    code, _, err = emoe_command("eval", "r")
    assert code == 2 and "r has no checkpoint yet" in err


def test_forms_of_settings() -> None:
    rest, settings = commands.split_settings(
        "recipe --a.b 1 --a.c=2 d.e-f=3 --run x.y --seed -4 --g.h -5 runs/v1.2/x=3 --out=a.b".split(), ("seed",)
    )
    assert settings == {"a.b": "1", "a.c": "2", "d.e-f": "3", "seed": "-4", "g.h": "-5"}
    assert rest == "recipe --run x.y runs/v1.2/x=3 --out=a.b".split()


def test_names_of_all_fields_are_settings() -> None:
    assert set(commands.FIELDS) == set(Experiment.__dataclass_fields__)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "emoe list: stopped\n"),
        (NumericFailure("step 5: not finite"), 4, "emoe list: step 5: not finite\n"),
        (MemoryError(), 4, "emoe list: out of memory; lower train.batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 4, "emoe list: out of memory; "),
        (PermissionError(13, "Permission denied", "/x"), 5, "emoe list: /x: Permission denied; "),
        (OSError(28, "No space left on device"), 5, "emoe list: No space left on device; "),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, emoe_command: Command
) -> None:
    def broken(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(commands, "cmd_list", broken)
    assert (found := emoe_command("list"))[0] == code and found[2].startswith(text)


def test_a_fault_of_the_program_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: list[str]) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(commands, "cmd_list", broken)
    with pytest.raises(ZeroDivisionError):
        main(["list"])


def test_a_terminal_without_unicode(trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["eval", str(trained["toy-8modes-mdlm"]), "--nfe", "1", "--samples", "50"]) == 0
    assert raw.getvalue().isascii() and b"MDLM" in raw.getvalue()


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["list"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    """As in `emoe list | head -1`, with the reader gone from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "emoe", *words]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, env=environment, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_codes_of_a_real_process(empty_folder: Path) -> None:
    done = shell("-m", "emoe", "train", "toy-8modes-emoe", "--method.top-k", "9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "emoe train: method.top_k: must be in 1..experts = 8, got 9\n"


def test_every_command_has_a_function() -> None:
    assert all(callable(getattr(commands, f"cmd_{name}")) for name in COMMANDS)
    assert all(f"emoe {name}" in cli.TOP_HELP for name in ("demo", "list", "train", "eval"))


def test_the_demo_in_small(emoe_command: Command) -> None:
    words = [*"--train.steps 2 --train.batch 4 --eval.samples 30 --eval.nfe 1".split(), *TINY[6:14]]
    code, out, err = emoe_command("demo", "--out", "d", "--domain.points", 100, *words, "--quiet")
    assert code == 0 and not err and "d/report.html" in out
    assert all(Path("d", name).stat().st_size for name in ("report.html", "figure.png", "digits.png", "results.json"))
    assert "mnist-mdlm, mnist-vadd, mnist-emoe: released weights" in out


def test_an_exact_law_that_is_too_large_is_refused_with_what_to_ask_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--backbone.depth 3 --backbone.width 8 --backbone.hidden 8 --train.steps 1 --domain.points 50"
    folder = str(tmp_path / "deep")
    assert main(["train", "toy-8modes-emoe", "--run", folder, "--device", "cpu", "--quiet", *sizes.split()]) == 0
    capsys.readouterr()
    assert main(["eval", folder, "--exact", "--nfe", "1", "--samples", "20", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "8^(2 * 2) routes" in said and "more than 200000" in said and "bound@T or iw@T,K" in said
    assert not (tmp_path / "deep" / "eval.json").exists()
