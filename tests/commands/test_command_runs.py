"""Commands on trained runs: train, sample, eval, verify, release, report and the demo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emoe.runs.train import load_run

Command = Callable[..., tuple[int, str, str]]
TRAIN = "train toy-8modes-mdlm --domain.points 500 --run r".split()
SMALL = "--train.steps 20 --backbone.width 8 --backbone.hidden 16 --backbone.heads 2 --quiet --device cpu".split()


@pytest.mark.parametrize("recipe", ["toy-8modes-mdlm", "toy-8modes-vadd", "rows-emoe"])
def test_train_sample_eval(recipe: str, trained: dict[str, Path], command: Command) -> None:
    run = trained[recipe]
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged == [5, 10, 15, 20]

    code, out, _ = command("sample", run, "--n", 7, "--nfe", 2, "--json")
    drawn = json.loads(out)
    assert code == 0 and drawn["nfe"] == 2
    opened = load_run(run, device="cpu")
    assert drawn["samples"] == opened.sample(7, 2).tolist()
    assert command("sample", run, "--n", 7, "--nfe", 2, "--json", "--seed", 1)[1] != out
    plain = command("sample", run, "--n", 7, "--nfe", 2)[1]
    assert [[int(word) for word in line.split()] for line in plain.splitlines()] == drawn["samples"]

    code, out, _ = command("eval", run, "--json", "--likelihood", "none")
    rows = json.loads(out)
    metrics = {"validity", "overlap"} | ({"pair_overlap"} if recipe.startswith("rows") else set())
    assert code == 0 and {(row["metric"], row["nfe"]) for row in rows} == {(m, n) for m in metrics for n in (1, 2)}
    assert all(row["method"] == recipe.split("-")[-1] and 0 <= row["value"] <= 100 for row in rows)
    words = ["--nfe", 1, "--samples", 50, "--rows", 40, "--likelihood", "objective bound@2 iw@2,3"]
    rows = [row for row in json.loads(command("eval", run, *words, "--json")[1]) if row["convention"]]
    units = {(row["metric"], row["convention"]) for row in rows}
    assert units == {(m, c) for m in ("nll", "bpd", "ppl") for c in ("objective", "bound@2", "iw@2,3")}
    assert all(row["nfe"] is None and row["n"] == 40 and row["stderr"] > 0 for row in rows)
    code, out, _ = command("eval", run, *words)  # tables, without --json: nothing unnamed, nothing unexplained
    assert code == 0 and "not a bound" in out and "bounds the NLL of the 2-step sampler" in out


def test_samples_as_a_file(trained: dict[str, Path], command: Command) -> None:
    run = trained["rows-vadd"]
    code, out, err = command("sample", run, "--n", 9, "--out", "x.npy")
    assert code == 0 and not out and "x.npy: 9 rows" in err and np.load("x.npy").shape == (9, 3)
    code, out, _ = command("sample", run, "--n", 9, "--out", "y", "--json", "--picture", "y.png")
    assert code == 0 and json.loads(out) == {"nfe": 1, "out": "y.npy"}
    assert (np.load("y.npy") == np.load("x.npy")).all() and Path("y.png").stat().st_size > 1000


def test_completions(trained: dict[str, Path], command: Command) -> None:
    run = trained["toy-8modes-emoe"]
    code, out, _ = command("sample", run, "--given", "12,?", "?,7", "--n", 2, "--picture", "x.png")
    lines = [[int(word) for word in line.split()] for line in out.splitlines()]
    assert code == 0 and [line[0] for line in lines[:2]] == [12, 12] and [line[1] for line in lines[2:]] == [7, 7]
    assert Path("x.png").stat().st_size > 1000
    Path("rows.csv").write_text("1,2\n3,4\n")
    code, out, _ = command("sample", run, "--given", "rows.csv", "--keep", 1, "--n", 1, "--json")
    outcome = json.loads(out)
    assert code == 0 and outcome["given"] == [[-1, 2], [-1, 4]] and [row[1] for row in outcome["samples"]] == [2, 4]
    assert command("sample", run, "--given=-1,5", "--n", 1)[1].split()[1] == "5"
    assert command("sample", run, "--continue", "5,?", "--n", 1)[1].split()[0] == "5"
    for words, code, fragment in (
        ("--given 1,2", 2, "given: nothing to fill in, in row 0 all tokens are given; say with --keep"),
        ("--given 1,2 --keep all", 2, "keep: all leaves nothing to fill in"),
        ("--given 1,? --ink dark", 2, "ink: is for "),
        ("--given none.csv", 3, "none.csv: does not exist"),
        ("--continue ?,1", 2, "continue: row 0 has a hole before its last word; use --given to fill holes"),
    ):
        returned, out, err = command("sample", run, *words.split())
        assert returned == code and not out and fragment in err and err.count("\n") == 1


def test_settings_of_a_trained_run(trained: dict[str, Path], command: Command) -> None:
    run = trained["toy-8modes-emoe"]
    before = (run / "experiment.json").read_bytes()
    taus = ([], ["--method.route-tau", 1], ["--method.route-tau", 0])  # greedy routes
    drawn = [command("sample", run, "--n", 200, "--json", *words) for words in taus]
    assert [code for code, _, _ in drawn] == [0, 0, 0] and drawn[0][1] == drawn[1][1] != drawn[2][1]
    assert (run / "experiment.json").read_bytes() == before
    np.save("longer.npy", np.arange(40).reshape(10, 4))
    for words, fragments in (
        (["sample", run, "--method.route-tau", -1], ["method.route_tau: must be >= 0, got -1.0"]),
        (["sample", trained["toy-8modes-mdlm"], "--method.route-tau", 0], ["method.route-tau: no such field"]),
        (["sample", run, "--backbone.width", 16], ["do not fit", "size mismatch"]),
        (["eval", run, "--eval-lm", "x"], ["eval-lm: ", "was not trained on text"]),
        (["eval", trained["rows-emoe"], "--exact"], ["exact: rows-emoe"]),
        (
            ["eval", trained["rows-emoe"], "--domain.path", "longer.npy"],
            ["domain: the data have", "length=4", "length=3"],
        ),
    ):
        code, out, err = command(*words)
        assert code == 2 and not out and all(fragment in err for fragment in fragments) and err.count("\n") <= 6


def test_evaluation_is_recorded(trained: dict[str, Path], command: Command) -> None:
    runs = [trained["toy-8modes-mdlm"], trained["toy-8modes-emoe"]]
    words = "--nfe 1 --samples 100 --results new/r.json --json --likelihood none".split()
    code, out, _ = command("eval", *runs, *words)
    file = json.loads(Path("new/r.json").read_text())
    assert code == 0 and file["rows"] == json.loads(out) and {row["method"] for row in file["rows"]} == {"mdlm", "emoe"}
    assert file["methods"]["emoe"]["label"] == "E-MoE" and all((run / "eval.json").exists() for run in runs)
    (info, *_) = file["runs"].values()
    assert info["command"].startswith("emoe eval ") and info["command"].endswith("--likelihood none")
    code, out, _ = command("eval", runs[1], "--method.route-tau", 0, "--eval.batch", 50, *words)
    (recipe,) = {row["recipe"] for row in json.loads(out)}
    assert recipe.startswith("toy-8modes-emoe ") and "train.steps=20" in recipe and "method.route-tau=0" in recipe
    merged = json.loads(Path("new/r.json").read_text())["rows"]  # the ablation replaces nothing
    assert [row for row in merged if "route-tau" not in row["recipe"]] == file["rows"] and len(merged) == 6
    code, out, _ = command("report", "new/r.json", "--run", runs[0], "--out", "report.html")
    assert code == 0 and out == "report.html\n" and "<html" in Path("report.html").read_text(encoding="utf-8")
    Path("other.json").write_text('{"rows": []}')
    for words in (["report", "other.json"], ["eval", runs[0], "--results", "other.json"]):
        code, out, err = command(*words)
        assert code == 2 and not out and "other.json: " in err and err.count("\n") == 1


def test_exact_laws(trained: dict[str, Path], command: Command) -> None:
    code, out, _ = command("eval", trained["toy-8modes-emoe"], "--exact", "--nfe", 1, "--likelihood", "none", "--json")
    exact = {row["metric"] for row in json.loads(out) if row["convention"] == "exact"}
    assert code == 0 and exact == {"validity", "overlap", "nll", "kl"}
    deep = "--backbone.depth 3 --backbone.width 8 --backbone.hidden 8 --train.steps 1 --domain.points 50 --quiet"
    assert command("train", "toy-8modes-emoe", "--run", "deep", "--device", "cpu", *deep.split())[0] == 0
    code, _, err = command("eval", "deep", "--exact", "--nfe", 1, "--samples", 20)
    assert code == 2 and "8^(2 * 2) routes" in err and "more than 200000" in err and "bound@T or iw@T,K" in err
    assert not Path("deep/eval.json").exists()
    code, out, err = command("verify", "--method", "mdlm", "--json")
    assert code == 0 and all(line["passed"] and line["model"] == "tiny mdlm" for line in json.loads(out))
    code, out, err = command("verify", "--method", "mdlm")
    assert (
        code == 0
        and out.endswith(" checks passed\n")
        and "tiny mdlm: bound@1 >= exact NLL at each of 4 rows: ok" in err
    )


def test_used_folders_and_those_that_are_not_whole(trained: dict[str, Path], command: Command) -> None:
    assert command(*TRAIN, *SMALL, "--json")[0] == 0
    code, out, err = command(*TRAIN, *SMALL)
    assert code == 2 and not out and "already holds a trained run; add --resume" in err
    code, out, err = command(*TRAIN, *SMALL, "--resume", "--seed", 3, "--train.batch", 8)
    changes = [line.split(": ", 1)[1].strip() for line in err.splitlines()[1:3]]
    assert code == 2 and not out and changes == ["seed: 0 -> 3", "train.batch: 512 -> 8"]
    code, out, _ = command(*TRAIN, *SMALL, "--resume", "--json")
    assert code == 0 and json.loads(out) | {"seconds": 0} == {"run": "r", "step": 20, "steps": 20, "seconds": 0}
    saved = Path("r/experiment.json").read_text()
    for text, fragment in {
        saved[:-20]: "not readable as JSON",
        saved.replace('"seed": 0', '"sead": 0'): "sead: unknown field of Experiment; did you mean 'seed'?",
    }.items():
        Path("r/experiment.json").write_text(text)
        for words in (["sample", "r"], [*TRAIN, *SMALL, "--resume"]):
            code, out, err = command(*words)
            assert code == 2 and not out and "r/experiment.json: " in err and fragment in err, err
    Path("file").write_text("")
    for words in (
        ["train", "toy-8modes-mdlm", "--run", "file/run", *SMALL],
        ["sample", trained["rows-mdlm"], "--out", "none/x.npy"],
        ["eval", trained["rows-mdlm"], "--results", "file/results.json"],
    ):
        code, out, err = command(*words)
        assert code == 5 and not out and err.count("\n") == 1


def test_released_weights(trained: dict[str, Path], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained["rows-mdlm"]
    code, _, err = command("release", run, run, "--out", "out")
    assert code == 2 and "which cannot name a folder; give one: --name" in err and not Path("out").exists()
    code, out, _ = command("release", run, "--out", "out", "--name", "mine", "--precision", "bf16")
    assert code == 0 and out.startswith("out/mine: ") and " MB in bf16; largest rounding error " in out
    code, out, _ = command("release", run, "--out", "out", "--name", "b", "--licence", "CC0-1.0", "--json")
    (entry,) = json.loads(out)
    assert code == 0 and (entry["name"], entry["path"]) == ("b", "out/b") and load_run("out/b").licence == "CC0-1.0"
    monkeypatch.setenv("EMOE_WEIGHTS", "out")
    samples = [command("sample", name, "--n", 3, "--json")[1] for name in ("mine", "out/mine")]
    assert samples[0] == samples[1] and np.shape(json.loads(samples[0])["samples"]) == (3, 3)
    code, _, err = command("eval", "mine")  # its data are not here
    assert code == 3 and "rows.npy" in err


def test_callbacks(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    words = "train toy-8modes-mdlm --domain.points 50 --train.steps 2 --train.batch 4 --device cpu".split()
    _, _, err = command(*words, "--run", "a")
    assert "toy-8modes-mdlm seed 0: step 2/2 (100.0%)" in err
    assert command(*words, "--run", "b", "--quiet")[2] == ""
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = command(*words, "--run", "c", "--wandb", "--quiet")
    assert code == 2 and err == "emoe train: wandb: the package is missing; pip install wandb\n"


def test_the_demo_in_small(command: Command) -> None:
    sizes = "--backbone.width 8 --backbone.hidden 16 --backbone.heads 2 --backbone.time-size 8 --domain.points 100"
    words = "--train.steps 2 --train.batch 4 --eval.samples 30 --eval.nfe 1 --quiet"
    code, out, err = command("demo", "--out", "d", *sizes.split(), *words.split())
    assert code == 0 and not err and "d/report.html" in out
    assert all(Path("d", name).stat().st_size for name in ("report.html", "figure.png", "digits.png", "results.json"))
