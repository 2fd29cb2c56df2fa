"""`emoe reproduce mnist` and `digits`: the chain, what it keeps and continues, tables, figures and the film."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from emoe.backbones.base import total_parameters
from emoe.backbones.unet import UNetConfig
from emoe.config import ConfigError
from emoe.domains.images import DigitsConfig, as_images, judge
from emoe.domains.images.data import MASK
from emoe.domains.images.film import EXPERTS, GAP, GROUND, Frame, Recorder, encode, palette, tile, write_film
from emoe.engine.trainer import TrainConfig
from emoe.evaluation.likelihood import estimate_nll
from emoe.experiment import EvalConfig, Experiment
from emoe.methods.emoe import EMoEConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.pretrained import release
from emoe.recipes import _RECIPES, all_recipes
from emoe.reporting.docs import BLOCKS
from emoe.reporting.images import KINDS, bpd_tables, image_page, nfe_tables
from emoe.reporting.recipes import reference_name
from emoe.reporting.results import Results, Row, RunInfo, record
from emoe.reporting.table import Table, conventions_of, models
from emoe.rng import Rng, derive_seed
from emoe.runs import load_run
from emoe.studies import images
from emoe.types import Convention

LATENT = ["objective", "bound@1", "bound@4", "bound@16", "bound@64", "iw@1,64", "iw@4,64"]
PLAIN = ["objective", "nelbo", "bound@1", "bound@4", "bound@16", "bound@64"]
SIZES = "--nfe 1,2 --samples 40 --rows 20 --iw-rows 3 --device cpu --jobs 1 --quiet"
METHODS = {
    "mdlm": MDLMConfig(t_low=1 / 64),
    "vadd": VADDConfig(t_low=1 / 64, latent=2),
    "emoe": EMoEConfig(t_low=1 / 64, experts=3),
}


def tiny_experiment(method: str) -> Experiment:
    return Experiment(
        name=f"digits-{method}",
        domain=DigitsConfig(),
        backbone=UNetConfig(channels=8, hidden=8, time_size=4, time_hidden=8, groups=2, router_std=0.5),
        method=METHODS[method],
        train=TrainConfig(steps=3, batch=8),
        eval=EvalConfig(samples=30, batch=25),
    )


@pytest.fixture(scope="module", autouse=True)
def tiny_recipes(tmp_path_factory: pytest.TempPathFactory):
    """Recipes `digits-...` of tiny networks, and one judge for all tests."""
    all_recipes()  # those of the package are registered first, and come back
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMOE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(judge, "_judges", {})
        patch.setattr(judge, "SEEN", 6_000)  # a judge of little training
        for name in [name for name in _RECIPES if name.startswith("digits-")]:
            patch.delitem(_RECIPES, name)
        for method in METHODS:
            patch.setitem(_RECIPES, f"digits-{method}", lambda method=method: tiny_experiment(method))
        yield


def study(folder: Path, words: str = "", sizes: str = SIZES) -> int:
    places = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    return images.main([*words.split(), *sizes.split(), *places], "digits")


class Finished(NamedTuple):
    folder: Path
    first: bytes  # results after the first method alone


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A study of all methods, the first of them run by itself."""
    folder = tmp_path_factory.mktemp("study")
    assert study(folder, "--methods mdlm") == 0
    first = (folder / "results/digits.json").read_bytes()
    assert study(folder, "--methods emoe,vadd,mdlm") == 0
    return Finished(folder, first)


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the chain


def test_the_study_measures_everything_and_writes_tables_and_figures(finished):
    results = Results.load(finished.folder / "results/digits.json").only(task="digits")
    for method in METHODS:
        mine = results.only(method=method)
        assert {row.recipe for row in mine.rows} == {f"digits-{method}"}
        assert conventions_of(models(mine), "bpd", KINDS) == (PLAIN if method == "mdlm" else LATENT)
        for row in mine.select(metric="bpd"):
            assert row.n == (3 if row.convention.startswith("iw") else 20) and row.stderr is not None
        for nfe in (1, 2):
            found = {row.metric: row for row in mine.select(nfe=nfe)}
            assert {"frechet", "precision", "recall", "density", "coverage", "confidence", "class_tv"} <= set(found)
            assert found["ink"].n == 40
        gains = mine.select(metric="coordination_gain")
        assert [row.convention for row in gains] == ([] if method == "mdlm" else ["bound@1"])
    routed, active = (results.select(method="emoe", metric=name)[0].value for name in ("params", "params_active"))
    (dense,) = results.select(method="mdlm", metric="params")
    assert active < routed
    run = load_run(next((finished.folder / "runs").glob("digits-mdlm-*")), device="cpu")
    assert dense.value == total_parameters(run.method)

    text = (finished.folder / "results/digits.md").read_text()
    assert text == image_page(results, "digits")
    assert all(f" {name} |" in text for name in {*PLAIN, *LATENT}) and "0.077" not in text
    figures = finished.folder / "results/figures"
    names = {"digits-samples.png", "digits-curves.png", "digits-film.gif"}
    assert {path.name for path in figures.iterdir()} == names
    assert all((figures / name).stat().st_size > 5_000 for name in names)


def test_a_second_call_does_nothing(finished, capsys):
    before = times(finished.folder)
    assert study(finished.folder, "--methods mdlm,vadd,emoe", SIZES.replace("--quiet", "")) == 0
    assert times(finished.folder) == before
    said = capsys.readouterr()
    assert "3 runs, 3 of them trained before" in said.err and "nothing, all is up to date" in said.err
    assert "iw@4,64" in said.out and "real data" in said.out  # it shows the tables all the same


def test_methods_that_run_separately_are_merged(finished):
    path = finished.folder / "first.json"
    path.write_bytes(finished.first)
    first, both = Results.load(path), Results.load(finished.folder / "results/digits.json")
    assert {row.method for row in first.rows} == {"mdlm", "data"}
    kept = {row.identity: row for row in both.rows}
    assert all(kept[row.identity] == row for row in first.rows)  # the same numbers of the same run
    assert len(both.runs) == 2
    path.unlink()


def test_more_samples_and_rows_are_measured_anew(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "copy")
    before = Results.load(tmp_path / "copy/results/digits.json")
    more = SIZES.replace("--samples 40", "--samples 50").replace("--nfe 1,2", "--nfe 2")
    assert study(tmp_path / "copy", "--methods mdlm --only score", more) == 0
    after = Results.load(tmp_path / "copy/results/digits.json")
    changed = {(row.method, row.nfe) for row in after.rows if row not in before.rows}
    assert changed == {("mdlm", 2), ("data", None)}
    assert {row.n for row in after.select(method="mdlm", metric="ink")} == {40, 50}
    assert study(tmp_path / "copy", "--methods mdlm --only score --samples 30", SIZES.replace("--samples 40", "")) == 0
    assert Results.load(tmp_path / "copy/results/digits.json").rows == after.rows  # fewer do not replace more


def test_real_images_stand_beside_samples(finished):
    results = Results.load(finished.folder / "results/digits.json").only(method="data")
    found = {row.metric: row for row in results.rows}
    assert {(row.recipe, row.seed, row.nfe) for row in results.rows} == {("reference", None, None)}
    domain = DigitsConfig().build(0)
    assert found["ink"].value == pytest.approx(100 * domain.test_rows.double().mean().item())
    assert found["ink"].n == 300 and found["pixel_tv"].n == found["frechet"].n == 40
    assert found["copied"].value == pytest.approx(4.0)  # 12 of the 300 test images, not the training images
    assert found["frechet"].value > 0 and found["confidence"].value > 50


def test_bits_per_dimension_are_nats_per_pixel_over_log_2(finished):
    """The recorded value is the estimate on the test images, in nats per row, over L ln 2."""
    results = Results.load(finished.folder / "results/digits.json")
    run = load_run(next((finished.folder / "runs").glob("digits-emoe-seed0-*")), device="cpu")
    rows = run.domain.fresh(20, derive_seed(0, "held out"))
    nll = estimate_nll(run.method, rows, Convention.parse("bound@4"), seed=0, batch=25)
    bits, nats = (
        results.select(method="emoe", metric=name, convention="bound@4")[0] for name in ("bpd", "nll")
    )  # fmt: skip
    assert nats.value == pytest.approx(nll.value, rel=1e-6)
    assert bits.value == pytest.approx(nll.value / (64 * math.log(2)), rel=1e-6)
    assert bits.stderr == pytest.approx(nats.stderr / (64 * math.log(2)), rel=1e-6)


def test_batches_of_likelihoods_stay_small():
    """No network call sees more than 2^19 tokens, draws counted; the number of calls is known beforehand."""
    experiment, domain = tiny_experiment("emoe"), DigitsConfig().build(0)
    method = experiment.build_method(domain.space).eval()
    plan = images.Plan(nfe=(3,), samples=60, rows=30, weighted_rows=3)
    run = images.Run(Path(), experiment, domain, method, 0)
    for stage in (Convention.parse("iw@1,64"), Convention.parse("bound@4"), 3):
        sizes: list[int] = []
        handle = method.backbone.register_forward_hook(lambda _, given, out, seen=sizes: seen.append(len(given[0])))
        plan.measure(stage, run, experiment, domain)
        handle.remove()
        assert len(sizes) == plan.calls(stage, experiment, domain)
        assert max(sizes) <= 2 * max(25, getattr(stage, "draws", 0))  # E-MoE runs clean and noisy rows at once
    large = images._batch(dataclasses.replace(experiment, eval=EvalConfig(batch=10**6)), domain)
    assert large * 64 == images.TOKENS


# --- stopping, continuing, parts


def test_the_parts_of_the_chain(tmp_path, capsys):
    assert study(tmp_path, "--methods mdlm --only draw") == 0
    assert not (tmp_path / "results").exists()
    assert study(tmp_path, "--methods mdlm --only score") == 0
    assert not list(tmp_path.glob("results/*.json"))
    assert study(tmp_path, "--methods mdlm --only train") == 0
    assert len(list(tmp_path.glob("runs/*/checkpoints/step-*"))) == 1
    assert not list(tmp_path.glob("results/figures/*"))
    run = next(tmp_path.glob("runs/*"))
    assert study(tmp_path, "--methods mdlm --only score") == 0
    assert not (run / images.KEPT).exists() and not (tmp_path / "results/digits.md").exists()
    assert study(tmp_path, "--methods mdlm --only draw") == 0
    assert (run / images.KEPT).exists() and (tmp_path / "results/digits.md").exists()
    capsys.readouterr()
    with pytest.raises(ConfigError, match="only: 'paint' is not known; allowed: train, score, draw"):
        study(tmp_path, "--only paint")


def test_after_the_budget_no_stage_starts_and_the_same_command_continues(tmp_path, capsys, monkeypatch):
    assert study(tmp_path, "--methods mdlm --budget 0") == 0
    assert "1 runs not trained" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))
    assert study(tmp_path, "--methods mdlm --only train") == 0
    real, measured = images.Plan.measure, []

    def measure(self, stage, *more):
        measured.append(stage)
        if len(measured) == 2:  # the budget ends while the second stage goes on
            monkeypatch.setattr(images.Chain, "_is_late", lambda chain: True)
        return real(self, stage, *more)

    monkeypatch.setattr(images.Plan, "measure", measure)
    late = images.Chain._is_late
    assert study(tmp_path, "--methods mdlm --only score --budget 60") == 0
    assert len(measured) == 2  # the real images are left, too
    assert "8 measurements not made: the budget is used up" in capsys.readouterr().err
    monkeypatch.setattr(images.Chain, "_is_late", late)
    assert study(tmp_path, "--methods mdlm --only score --budget 60") == 0
    assert sorted(map(str, measured)) == sorted(["None", *PLAIN, "1", "2"])  # none of them twice


def test_a_run_begun_elsewhere_is_continued(tmp_path):
    """A folder with an unfinished run, copied to another place, ends like one that was never interrupted."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    words = "--methods emoe --only train --train.steps 4 --train.save-every 2"
    assert study(whole, words) == 0
    (run,) = (whole / "runs").iterdir()
    shutil.copytree(run, part / "runs" / run.name)
    shutil.rmtree(part / "runs" / run.name / "checkpoints" / "step-000000004", ignore_errors=True)
    for newest in sorted((part / "runs" / run.name / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(newest)
    assert study(part, words) == 0
    ours, theirs = (load_run(one / "runs" / run.name, device="cpu") for one in (whole, part))
    assert ours.step == theirs.step == 4
    assert all(torch.equal(a, b) for a, b in zip(ours.method.parameters(), theirs.method.parameters(), strict=True))


def test_an_unfinished_run_is_measured_on_request_and_called_so(tmp_path, capsys):
    words = "--methods mdlm --train.steps 4 --train.save-every 2"
    assert study(tmp_path, f"{words} --only train") == 0
    (run,) = (tmp_path / "runs").iterdir()
    last = run / "checkpoints" / "step-000000004"
    shutil.move(last, tmp_path / "kept")
    assert study(tmp_path, f"{words} --only score") == 0
    assert "Frechet" not in capsys.readouterr().out  # nothing is measured of a run that goes on
    assert study(tmp_path, f"{words} --only score --unfinished") == 0
    rows = Results.load(tmp_path / "results/digits.json").select(method="mdlm", metric="ink")
    assert {row.recipe for row in rows} == {"digits-mdlm train.steps=4 reached=2"}
    assert study(tmp_path, f"{words} --only draw --unfinished") == 0
    assert "All with `train.steps=4 reached=2`" in (tmp_path / "results/digits.md").read_text()
    shutil.move(tmp_path / "kept", last)
    assert study(tmp_path, words) == 0
    results = Results.load(tmp_path / "results/digits.json")
    assert len({row.recipe for row in results.select(method="mdlm")}) == 2  # the early numbers stay in the file
    assert "| MDLM reached=2 |" in (tmp_path / "results/digits.md").read_text()  # and are called so


def test_released_weights_stand_in_for_a_run_on_request(finished, tmp_path, monkeypatch, capsys):
    (run,) = (finished.folder / "runs").glob("digits-emoe-*")
    release(run, tmp_path / "weights", precision="bf16")
    monkeypatch.setenv("EMOE_WEIGHTS", str(tmp_path / "weights"))
    assert study(tmp_path, "--methods emoe,mdlm --only score") == 0
    assert not (tmp_path / "results/digits.json").exists()  # only on request
    assert study(tmp_path, "--methods emoe,mdlm --only score --released") == 0
    capsys.readouterr()
    mine, theirs = (Results.load(place / "results/digits.json") for place in (tmp_path, finished.folder))
    assert {row.method for row in mine.select(task="digits")} == {"emoe", "data"}
    first, second = (
        {(row.metric, row.nfe, row.convention): row.value for row in found.select(method="emoe", task="digits")}
        for found in (mine, theirs)
    )
    assert first.keys() == second.keys()
    key = ("bpd", None, "bound@1")
    assert first[key] != second[key] and first[key] == pytest.approx(second[key], rel=0.01)  # rounded to 8 bits
    assert study(tmp_path, "--methods emoe --only draw --released") == 0
    assert {path.name for path in (tmp_path / "results/figures").iterdir()} >= {"digits-samples.png", "digits-film.gif"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-emoe-released"]  # the samples shown
    # Of another seed, or with a changed recipe, it is not the run that was asked for.
    for words in ("--seeds 1", "--method.route-tau 0.5"):
        assert study(tmp_path / "other", f"--methods emoe --only score --released {words}") == 0
    assert not (tmp_path / "other/results/digits.json").exists()
    # Nothing is trained in their place.
    assert study(tmp_path, "--methods emoe --released") == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-emoe-released"]


def test_a_folder_that_is_copied_here_later_enters_the_figures(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "here")
    runs, picture = tmp_path / "here/runs", tmp_path / "here/results/figures/digits-samples.png"
    (moved,) = runs.glob("digits-vadd-*")
    shutil.move(moved, tmp_path / moved.name)
    assert study(tmp_path / "here", "--methods mdlm") == 0
    without = np.asarray(Image.open(picture)).shape
    shutil.copytree(tmp_path / moved.name, runs / moved.name)
    assert study(tmp_path / "here", "--methods mdlm") == 0
    assert np.asarray(Image.open(picture)).shape[0] > without[0]  # a line more


def test_the_place_of_the_data_is_no_part_of_a_run(monkeypatch):
    monkeypatch.setenv("EMOE_DATA", "before")
    with images.data_root("there"):
        assert os.environ["EMOE_DATA"] == "there"
    assert os.environ["EMOE_DATA"] == "before"
    with images.data_root(None):
        assert os.environ["EMOE_DATA"] == "before"
    monkeypatch.delenv("EMOE_DATA")
    with images.data_root("there"):
        pass
    assert "EMOE_DATA" not in os.environ
    words = "--samples 5 --data-root /x --data-root=/y --train.steps 3".split()
    assert images._without_places(words) == "--samples 5 --train.steps 3".split()
    assert images.make_parser("mnist").parse_args(["--data-root", "x"]).data_root == "x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods mdlm,gan", "methods: 'gan' is not known; allowed: .*vadd"),
        ("--eval.samples 5", "eval.samples: the study sets it; use --samples"),
        ("--eval.nfe 5", "eval.nfe: the study sets it; use --nfe"),
        ("--domain.root x", "domain.root: the study sets it; use --data-root"),
        ("--samples 1", "samples: must be >= 2"),
        ("--budget x", "budget: expected minutes"),
    ],
)
def test_words_that_are_refused(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        images.main(words.split(), "digits")


# --- the film


def test_the_film_has_a_frame_for_every_step_and_one_before(finished):
    with Image.open(finished.folder / "results/figures/digits-film.gif") as film:
        assert film.n_frames == images.FILM_STEPS + 1
        film.seek(images.FILM_STEPS)
        assert film.info["duration"] > 1_000


def test_the_film_shows_what_was_sampled(tmp_path):
    domain = DigitsConfig().build(0)
    method = tiny_experiment("emoe").build_method(domain.space).eval()
    recorder, gates = Recorder(3, 8), []

    def on_step(event):
        recorder(event)
        gates.append([gate.expert[..., 0] for gate in event.latent])

    rows = method.sample(3, 5, Rng(0), on_step=on_step)
    frames = recorder.frames
    assert len(frames) == 6 and (frames[0].images == MASK).all() and frames[0].experts == ()
    assert np.array_equal(frames[-1].images, as_images(rows))
    for frame, drawn in zip(frames[1:], gates, strict=True):
        assert [maps.shape[1] for maps in frame.experts] == [4, 2, 2, 2, 4]
        for maps, expert in zip(frame.experts, drawn, strict=True):
            assert np.array_equal(maps.reshape(3, -1), expert.numpy())

    data = encode(frames, 3, 2)
    path = tmp_path / "new" / "film.gif"
    write_film(frames, 3, path, largest=len(data))
    assert path.stat().st_size <= len(data)
    with Image.open(path) as film:
        assert film.n_frames == 6
        film.seek(5)
        page = np.asarray(film.convert("RGB")).reshape(-1, 3)
    colours = {tuple(colour) for colour in page.tolist()}
    known = np.array(palette(3)).reshape(-1, 3)
    used = {EXPERTS + int(expert) for maps in frames[-1].experts for expert in np.unique(maps)}
    assert {tuple(known[number].tolist()) for number in used | {0, 1}} <= colours
    assert tuple(known[MASK].tolist()) not in colours  # nothing is masked in the end


def test_films_without_routes_and_with_many_experts(tmp_path):
    masked = np.full((2, 8, 8), MASK, np.uint8)
    write_film([Frame(masked), Frame(np.zeros_like(masked))], 0, tmp_path / "plain.gif")
    with Image.open(tmp_path / "plain.gif") as film:
        assert film.n_frames == 2
    maps = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    write_film([Frame(masked), Frame(masked, (maps,))], 32, tmp_path / "many.gif")
    with Image.open(tmp_path / "many.gif") as film:
        assert film.n_frames == 2
    assert len({*zip(*[iter(palette(32)[3 * EXPERTS :])] * 3, strict=True)}) == 32  # all experts differ
    with pytest.raises(ValueError, match="at most 240 experts"):
        write_film([Frame(masked)], 241, tmp_path / "no.gif")
    with pytest.raises(ValueError, match="no frames"):
        write_film([], 3, tmp_path / "no.gif")


def test_tiles():
    cells = np.stack([np.array([[0, 1], [1, 0]]), np.full((2, 2), 5)]).astype(np.uint8)
    canvas = tile(cells, 4)
    assert canvas.shape == (8 + GAP, 8 + GAP)
    assert canvas[:4, :4].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert (
        (canvas[:4, 4 + GAP :] == 5).all()
        and (canvas[4:] == GROUND).all()
        and (canvas[:4, 4 : 4 + GAP] == GROUND).all()
    )


# --- tables


def row(method: str, metric: str, value: float, **fields: Any) -> Row:
    more = fields.pop("more", "")
    default: dict[str, Any] = dict(task="mnist", data="mnist", seed=0, nfe=None, n=100, stderr=None)
    return Row(
        **(default | dict(method=method, recipe=f"mnist-{method}{more}", metric=metric, value=value) | fields)
    )  # fmt: skip


def made(tmp_path: Path, rows: list[Row]) -> Results:
    fields = dict(command="c", commit="0123456789abcdef", device="a GPU", torch="2", python="3")
    return record(tmp_path / "mnist.json", RunInfo(**fields, date="2025-01-01T00:00:00Z", wall_s=1.0), rows)


MADE = [
    row("mdlm", "params", 2_070_001),
    row("mdlm", "params_active", 2_070_001),
    row("mdlm", "bpd", 0.08123, convention="objective", stderr=0.00044, n=10_000),
    row("mdlm", "bpd", 0.0811, convention="nelbo", n=10_000),
    row("mdlm", "bpd", 0.3, convention="bound@16", n=10_000),
    row("emoe", "params", 2_490_000),
    row("emoe", "params_active", 2_180_000),
    row("emoe", "bpd", 0.0612, convention="objective", n=10_000),
    row("emoe", "bpd", 0.9, convention="bound@4", n=10_000),
    row("emoe", "bpd", 0.7, convention="iw@4,64", n=1_000),
    row("emoe", "coordination_gain", 0.0123, convention="bound@1"),
    row("emoe", "frechet", 20.126, nfe=1, stderr=0.254),
    row("mdlm", "frechet", 90.0, nfe=1),
    row("mdlm", "frechet", 9.0, nfe=20),
    row("emoe", "coverage", 55.0, nfe=1),
    row("emoe", "ink", 10.0, nfe=1, n=5_000),
    row("data", "frechet", 0.42, recipe="reference", seed=None),
    row("data", "pixel_tv", 0.1, recipe="reference", seed=None, n=5_000),
    row("data", "judge_accuracy", 98.76, recipe="reference", seed=None),
]


def cells(table: Table) -> dict[str, list[str]]:
    """Label -> cells of a table."""
    return {line[0]: [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in line[1:]] for line in table.rows}


def test_bits_per_dimension_beside_the_paper(tmp_path):
    (table,) = bpd_tables(made(tmp_path, MADE))
    names = ["objective", "nelbo", "bound@4", "bound@16", "iw@4,64"]
    assert table.header == ["binarized MNIST", "parameters", "active", "paper", *names, "coordination gain"]
    shown = cells(table)
    assert list(shown) == ["MDLM", "E-MoE", "VADD"]
    numbers = ["0.0812 ±0.0004", "0.0811", "—", "0.3000", "—", "—"]
    assert shown["MDLM"] == ["2.07M\n*(2.07M)*", "2.07M", "*0.077*", *numbers]
    assert shown["E-MoE"][:5] == ["2.49M\n*(2.49M)*", "2.18M\n*(2.18M)*", "*0.062*", "0.0612", "—"]
    assert shown["E-MoE"][5:] == ["0.9000", "—", "0.7000", "+0.0123"]
    assert shown["VADD"] == ["—\n*(2.50M)*", "—", "*0.064*", *["—"] * 6]
    assert "10,000 test images; `iw` on 1,000." in table.note and "commit `0123456789ab` on a GPU" in table.note
    assert "bounds nothing where there is a latent" in table.note and "does not name a convention" in table.note


def test_measures_over_nfe_with_real_data(tmp_path):
    results = made(tmp_path, MADE)
    frechet, coverage = nfe_tables(results)
    assert frechet.header == ["binarized MNIST", "NFE 1", "NFE 20"] and coverage.title == "**Coverage (%)**"
    assert cells(frechet) == {
        "MDLM": ["90.00", "9.00"], "E-MoE": ["**20.13** ±0.25", "—"], "real data": ["0.42", "0.42"],
    }  # fmt: skip
    assert "5,000 samples for each NFE" in coverage.note and "98.8 % of the test images" in coverage.note


def test_changed_recipes_are_named_and_not_held_against_the_paper(tmp_path):
    changed = [row("emoe", "bpd", 0.5, convention="objective", more=" optim.lr=0.1 train.steps=200")]
    changed += [row("mdlm", "bpd", 0.6, convention="objective", more=" train.steps=200")]
    (table,) = bpd_tables(made(tmp_path / "a", changed))
    assert {label: line[2] for label, line in cells(table).items()} == {"MDLM": "—", "E-MoE optim.lr=0.1": "—"}
    assert "All with `train.steps=200`." in table.note
    (table,) = bpd_tables(made(tmp_path / "b", [*changed, *MADE]))
    shown = cells(table)
    assert shown["E-MoE"][2] == "*0.062*" and shown["E-MoE optim.lr=0.1 train.steps=200"][2] == "—"


def test_models_on_other_data_have_real_data_of_their_own(tmp_path):
    few = {"domain.points": "9"}
    rows = [row("emoe", "frechet", 5.0, nfe=1, more=" domain.points=9")]
    rows += [row("data", "frechet", 0.42, recipe="reference", seed=None)]
    assert list(cells(nfe_tables(made(tmp_path, rows))[0])) == ["E-MoE"]
    rows.append(row("data", "frechet", 0.7, recipe=reference_name(few | {"train.steps": "3"}), seed=None))
    assert cells(nfe_tables(made(tmp_path, rows))[0]) == {"E-MoE": ["5.00"], "real data": ["0.70"]}


def test_means_over_seeds(tmp_path):
    rows = [row("emoe", "frechet", value, seed=seed, nfe=1, stderr=9.0) for seed, value in enumerate((1.0, 2.0, 3.0))]
    (table,) = nfe_tables(made(tmp_path, rows))
    assert cells(table) == {"E-MoE": ["2.00 ±0.58"]} and "standard errors over seeds" in table.note


def test_blocks_of_docs(tmp_path):
    folder = tmp_path / "results"
    made(folder, MADE)
    (folder / "figures").mkdir()
    (folder / "figures" / "mnist-film.gif").touch()
    assert "*0.062*" in BLOCKS["mnist-bpd"](folder) and "| real data | 0.42 | 0.42 |" in BLOCKS["mnist-nfe"](folder)
    figures = BLOCKS["mnist-figures"](folder)
    assert "](../results/figures/mnist-film.gif)" in figures and "mnist-curves.png" not in figures
