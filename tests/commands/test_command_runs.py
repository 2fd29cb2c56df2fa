"""Commands on trained runs: train, sample, eval, verify, release and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emoe.runs.train import load_run

Command = Callable[..., tuple[int, str, str]]
QUICK = "--train.steps 2 --train.batch 4 --backbone.width 8 --backbone.hidden 16 --backbone.heads 2 --domain.points 50"


@pytest.mark.parametrize("recipe", ["toy-8modes-vadd", "rows-emoe"])
def test_train_sample_eval(recipe: str, trained: dict[str, Path], command: Command) -> None:
    run = trained[recipe]
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged == [5, 10, 15, 20]

    words = ["sample", run, "--n", 7, "--nfe", 2]
    samples = load_run(run, device="cpu").sample(7, 2).tolist()
    assert json.loads(command(*words, "--json")[1]) == {"nfe": 2, "samples": samples}
    assert [[int(word) for word in line.split()] for line in command(*words)[1].splitlines()] == samples
    code, out, err = command(*words, "--out", "x", "--json", "--picture", "x.png")
    assert code == 0 and json.loads(out) == {"nfe": 2, "out": "x.npy"} and "x.npy: 7 rows, NFE 2" in err
    assert np.load("x.npy").tolist() == samples and Path("x.png").stat().st_size > 1000

    words = ["eval", run, "--samples", 50, "--rows", 40, "--likelihood", "objective bound@2 iw@2,3"]
    rows = json.loads(command(*words, "--json")[1])
    metrics = {"validity", "overlap"} | ({"pair_overlap"} if recipe.startswith("rows") else set())
    names = ("objective", "bound@2", "iw@2,3")
    expected = {(metric, nfe, None) for metric in metrics for nfe in (1, 2)}
    expected |= {(metric, None, name) for metric in ("nll", "bpd", "ppl") for name in names}
    assert {(row["metric"], row["nfe"], row["convention"]) for row in rows} == expected
    assert all(row["n"] == 40 for row in rows if row["convention"]) and {row["method"] for row in rows} == {recipe[-4:]}
    code, out, _ = command(*words)  # tables: nothing unnamed, nothing unexplained
    assert code == 0 and "not a bound" in out and "bounds the NLL of the 2-step sampler" in out


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


def test_settings_of_a_trained_run(trained: dict[str, Path], command: Command) -> None:
    run = trained["toy-8modes-emoe"]
    before = (run / "experiment.json").read_bytes()
    taus = ([], ["--method.route-tau", 1], ["--method.route-tau", 0])  # greedy routes
    own, plain, greedy = (command("sample", run, "--n", 200, "--json", *words)[:2] for words in taus)
    assert own == plain != greedy and greedy[0] == 0
    assert (run / "experiment.json").read_bytes() == before


# Words, where TOY and ROWS are runs | exit code | fragments of what is said.
REFUSED = """
sample TOY --method.route-tau -1 | 2 | method.route_tau: must be >= 0, got -1.0
sample TOY --method.latent 3 | 2 | method.latent: no such field
sample TOY --backbone.width 16 | 2 | do not fit | size mismatch
sample TOY --data-root x | 2 | data-root: the data of this run come from no such folder; leave it out
sample TOY --given 1,2 | 2 | given: nothing to fill in, in row 0 all tokens are given; say with --keep
sample TOY --given 1,2 --keep all | 2 | keep: all leaves nothing to fill in
sample TOY --given 1,? --ink dark | 2 | ink: is for
sample TOY --given none.csv | 3 | none.csv: does not exist
sample TOY --continue ?,1 | 2 | continue: row 0 has a hole before its last word; use --given to fill holes
sample TOY --out none/x.npy | 5 | none/x.npy: No such file
eval TOY --eval-lm x | 2 | eval-lm: | was not trained on text
eval TOY --results other.json | 3 | other.json:
eval TOY --results other.json/r.json | 5 | other.json
eval ROWS --exact | 2 | exact: rows-emoe
eval ROWS --domain.path longer.npy | 2 | domain: the data have | length=4 | length=3
report other.json | 3 | other.json:
release ROWS --out out | 2 | which cannot name a folder; give one: --name
train toy-8modes-emoe --run TOY | 2 | already holds a trained run; add --resume
train toy-8modes-emoe --run TOY --resume --seed 3 | 2 | was started with another experiment | seed: 0 -> 3
train toy-8modes-emoe --run other.json/r | 5 | other.json
train rows-emoe | 3 | domain.path: give the file to train on
train rows-emoe --domain.path none.npy | 3 | none.npy: does not exist
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines(), ids=lambda case: case.partition(" | ")[0])
def test_refused(case: str, trained: dict[str, Path], command: Command) -> None:
    np.save("longer.npy", np.arange(40).reshape(10, 4))
    Path("other.json").write_text('{"rows": []}')
    words, expected, *fragments = case.split(" | ")
    runs = {"TOY": trained["toy-8modes-emoe"], "ROWS": trained["rows-emoe"]}
    code, out, err = command(*(runs.get(word, word) for word in words.split()))
    assert (code, out) == (int(expected), "") and all(fragment in err for fragment in fragments), err
    assert "Traceback" not in err and {path.name for path in Path().iterdir()} == {"longer.npy", "other.json"}


def test_evaluation_is_recorded(trained: dict[str, Path], command: Command) -> None:
    runs = [trained["toy-8modes-mdlm"], trained["toy-8modes-emoe"]]
    words = "--nfe 1 --samples 100 --results new/r.json --json --likelihood none".split()
    code, out, _ = command("eval", *runs, *words)
    file = json.loads(Path("new/r.json").read_text())
    assert code == 0 and file["rows"] == json.loads(out) and {row["method"] for row in file["rows"]} == {"mdlm", "emoe"}
    assert file["methods"]["emoe"]["label"] == "E-MoE" and all((run / "eval.json").exists() for run in runs)
    commands = {info["command"] for info in file["runs"].values()}
    assert all(text.startswith("emoe eval ") and text.endswith("--likelihood none") for text in commands)
    code, out, _ = command("eval", runs[1], "--method.route-tau", 0, "--eval.batch", 50, *words)
    (recipe,) = {row["recipe"] for row in json.loads(out)}
    assert recipe.startswith("toy-8modes-emoe ") and "train.steps=20" in recipe and "method.route-tau=0" in recipe
    merged = json.loads(Path("new/r.json").read_text())["rows"]  # the ablation replaces nothing
    assert [row for row in merged if "route-tau" not in row["recipe"]] == file["rows"] and len(merged) == 6
    code, out, _ = command("report", "new/r.json", "--run", runs[1], "--out", "report.html")
    assert (code, out) == (0, "report.html\n") and "<html" in Path("report.html").read_text(encoding="utf-8")


def test_exact_laws(trained: dict[str, Path], command: Command) -> None:
    code, out, _ = command("eval", trained["toy-8modes-emoe"], "--exact", "--nfe", 1, "--likelihood", "none", "--json")
    exact = {row["metric"] for row in json.loads(out) if row["convention"] == "exact"}
    assert code == 0 and exact == {"validity", "overlap", "nll", "kl"}
    words = f"train toy-8modes-emoe --run deep --device cpu --quiet --backbone.depth 3 {QUICK}"
    assert command(*words.split())[0] == 0
    code, _, err = command("eval", "deep", "--exact", "--nfe", 1, "--samples", 20)
    assert code == 2 and "8^(2 * 2) routes" in err and "bound@T or iw@T,K" in err
    assert not Path("deep/eval.json").exists()
    code, out, err = command("verify", "--method", "mdlm", "--json")
    assert code == 0 and all(line["passed"] and line["model"] == "tiny mdlm" for line in json.loads(out))
    code, out, _ = command("verify", "--method", "mdlm")
    assert code == 0 and out.endswith(" checks passed\n")
    assert "tiny mdlm: bound@1 >= exact NLL at each of 4 rows: ok (" in out


def test_released_weights(trained: dict[str, Path], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["release", trained["rows-mdlm"], "--out", "out", "--name"]
    code, out, _ = command(*words, "mine", "--precision", "bf16")
    assert code == 0 and out.startswith("out/mine: ") and " MB in bf16; largest rounding error " in out
    code, out, _ = command(*words, "b", "--licence", "CC0-1.0", "--json")
    assert code == 0 and json.loads(out)["path"] == "out/b" and load_run("out/b").licence == "CC0-1.0"
    monkeypatch.setenv("EMOE_WEIGHTS", "out")
    samples = [command("sample", name, "--n", 3, "--json")[1] for name in ("mine", "out/mine")]
    assert samples[0] == samples[1] and np.shape(json.loads(samples[0])["samples"]) == (3, 3)
    code, _, err = command("eval", "mine")  # its data are not here
    assert code == 3 and "rows.npy" in err


def test_train(command: Command) -> None:
    words = f"train toy-8modes-mdlm --device cpu --run a {QUICK}".split()
    code, out, err = command(*words)
    assert code == 0 and "a: step 2 of 2 after" in out and "next: emoe eval a" in out
    assert "toy-8modes-mdlm seed 0: step 2/2 (100.0%)" in err
    code, out, err = command(*words, "--quiet", "--resume", "--json")
    assert code == 0 and json.loads(out) | {"seconds": 0} == {"run": "a", "step": 2, "steps": 2, "seconds": 0}
    assert not err
