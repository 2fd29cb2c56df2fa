"""`emoe reproduce held-out` and `scaling`: which runs there are, what is measured, kept and refused, the tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from emoe.cli import main
from emoe.config import ConfigError
from emoe.domains.toy.densities import HELD_OUT
from emoe.evaluation.exact_toy import exact_rows
from emoe.recipes import get_recipe
from emoe.reporting.latent import held_out_tables
from emoe.reporting.render import markdown, plain
from emoe.reporting.results import Results, Row, RunInfo, record
from emoe.reporting.ties import (
    DEPTHS,
    RECIPE_DEPTH,
    VARIANTS,
    by_variant,
    default_depth,
    health_tables,
    scaling_tables,
    setting_of,
    variant_of,
)
from emoe.runs import load_run
from emoe.studies import held_out, scaling
from emoe.studies.scaling import last_lines, routing_health

TINY = (
    "--train.steps 3 --train.batch 8 --backbone.width 8 --backbone.hidden 8 --backbone.heads 2 --backbone.time-size 8 "
    "--device cpu --jobs 1 --quiet"
).split()
SCALING = (
    "--lengths 2,4 --families pairs --variants wake-sleep-row,plus,mdlm --domain.points 50 --eval.samples 50 "
    "--eval.nfe 1,2"
)
HELD = "--densities letter,pinwheel --seeds 0,1 --domain.points 60 --method.experts 2 --eval.nfe 1,2"


class Shown(NamedTuple):
    code: int
    out: str
    err: str


Reproduce = Callable[..., Shown]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def reproduce(capsys: pytest.CaptureFixture[str]) -> Reproduce:
    """Runs a study at a tiny size."""

    def run(study: str, words: str = "", settings: list[str] = TINY) -> Shown:
        capsys.readouterr()
        code = main(["reproduce", study, *words.split(), *settings])
        return Shown(code, *capsys.readouterr())

    return run


def trained_files(study: str) -> dict[str, int]:
    """Times of everything that training writes."""
    found = [*Path(f"runs/{study}").glob("*/checkpoints/*/*"), *Path(f"runs/{study}").glob("*/metrics.jsonl")]
    return {str(path): path.stat().st_mtime_ns for path in found}


def made(rows: list[Row], name: str = "r.json") -> Results:
    fields = dict(command="c", commit="0123456789abcdef", device="a GPU", torch="2", python="3")
    return record(name, RunInfo(**fields, date="2025-01-01T00:00:00Z", wall_s=1.0), rows)


def ties_row(
    metric: str, value: float, *, variant: str = "plus", data: str = "pairs-L4", more: str = "", **fields: Any
) -> Row:
    recipe, settings = VARIANTS[variant]
    place = setting_of(data)
    words = [f"backbone.depth={default_depth(place.length)}"] if "backbone.depth" not in more else []
    words += [more] if more else []
    words += [f"domain.length={place.length}", *(f"{name}={text}" for name, text in settings.items())]
    default = dict(seed=0, nfe=1 if metric in ("ties", "coverage") else None, method=recipe.removeprefix("ties-"))
    named = dict(recipe=" ".join([recipe, *words]))
    return Row(task="ties", data=data, metric=metric, value=value, **(default | named | fields))


def exact_row(method: str, metric: str, value: float, **fields: Any) -> Row:
    default: dict[str, Any] = dict(data="letter", seed=0, nfe=1, more="train.steps=8000") | fields
    recipe = f"toy-8modes-{method} domain.density={default['data']} {default.pop('more')}"
    return Row(task="toy", method=method, recipe=recipe, metric=metric, convention="exact", value=value, **default)


# Which runs there are


def test_order_and_depth_of_the_runs() -> None:
    lengths = [2, 8, 64]
    made = scaling.make_experiments(["all-carry", "mdlm", "plus"], ["pairs", "sums"], lengths, [0, 1], {})
    assert len(made) == len({(one.name, one.seed) for one in made}) == 36
    order = [(variant_of(one.name)[0] == "all-carry", -one.domain.length) for one in made]  # type: ignore[attr-defined]
    assert order == sorted(order)
    assert {one.backbone.depth for one in made if one.domain.length == 64} == {6}  # type: ignore[attr-defined]
    assert [default_depth(length) for length in (2, 3, 4, 12, 16, 17, 64, 128)] == [2, 3, 3, 4, 4, 6, 6, 6]
    assert all(default_depth(length) == depth for length, depth in DEPTHS.items())
    same = scaling.make_experiments(["plus"], ["pairs"], lengths, [0], {}, depth=3)
    assert [one.backbone.depth for one in same] == [3, 3, 3]  # type: ignore[attr-defined]


def test_lengths_that_a_family_cannot_have_are_left_out() -> None:
    made = scaling.make_experiments(["mdlm"], ["pairs", "permutations", "sums"], [6, 5], [0], {})
    assert [(one.domain.family, one.domain.length) for one in made] == [  # type: ignore[attr-defined]
        ("pairs", 6), ("permutations", 6), ("permutations", 5)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="pairs cannot cut 3 positions"):
        scaling.make_experiments(["mdlm"], ["pairs"], [3], [0], {})


def test_names_of_recipes_tell_variants_apart() -> None:
    settings = {"train.steps": "7", "method.t_low": "0.1", "domain.symbols": "4"}
    made = scaling.make_experiments(list(VARIANTS), ["blocks"], [2, 16], [0], settings)
    assert len({one.name for one in made}) == 2 * len(VARIANTS)
    for one in made:
        variant, changes = variant_of(one.name)
        recipe, own = VARIANTS[variant]
        assert one.name.startswith(f"{recipe} ") and changes == {"method.t-low": "0.1", "train.steps": "7"}
        assert all(str(getattr(one.method, name[7:].replace("-", "_"))) == text for name, text in own.items())
    assert {get_recipe(recipe).backbone.depth for recipe, _ in VARIANTS.values()} == {RECIPE_DEPTH}  # type: ignore[attr-defined]
    # What a variant is made of wins, and equal runs come once.
    twice = scaling.make_experiments(["plus", "wake-sleep-row"], ["pairs"], [16], [0], {"method.credit": "row"})
    assert [one.name for one in twice] == ["ties-emoe-plus method.credit=row"]
    (kept,) = scaling.make_experiments(["wake-sleep-row"], ["pairs"], [16], [0], {"method.credit": "position"})
    assert kept.method.credit == "row"  # type: ignore[attr-defined]


def test_held_out_runs_are_complete_seed_by_seed() -> None:
    made = held_out.make_experiments(["emoe", "emoe-plus"], list(HELD_OUT), (3, 4), held_out.DEFAULTS)
    assert [one.seed for one in made] == [3] * 10 + [4] * 10
    assert made[0].name == "toy-8modes-emoe domain.density=pinwheel train.steps=8000"
    assert {one.train.steps for one in made} == {8_000} and {one.eval.nfe for one in made} == {(1, 2, 4)}
    assert len({one.name for one in made}) == 10


# The commands


def test_scaling_from_end_to_end(reproduce: Reproduce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HELD_OUT_ROWS", 100)
    done = reproduce("scaling", SCALING)
    assert done.code == 0 and not done.err
    results = Results.load("results/scaling.json")
    assert len(results.select(metric="ties", nfe=(1, 2))) == 2 * 6 + 2 * 2  # models, and the ideal chain
    for metric in ("rows_valid", "coverage", "pair_overlap", "entropy"):
        assert len(results.select(metric=metric, nfe=(1, 2))) == 2 * 6
    assert len(results.select(metric="coordination_gain", convention="bound@1", n=100)) == 4  # not of mdlm
    assert {row.value for row in results.select(method="ideal", nfe=1)} == {12.5}
    assert Path("results/figures/scaling.png").stat().st_size > 1000

    groups = by_variant(results)
    assert {(place.length, label) for place, label in groups} == {
        (length, label) for length in (2, 4) for label in ("mdlm", "plus", "wake-sleep-row")
    }
    found = {row.metric: row for row in groups[setting_of("pairs-L4"), "plus"] if row.nfe is None}
    lines = last_lines(next(Path("runs/scaling").glob("ties-emoe-plus-*/metrics.jsonl")))
    assert len(lines) == 1  # three steps
    # Depth 3, of whose blocks the last is summed out: it has no posterior, but experts in use.
    assert {"route_kl/block1", "route_kl/block2", "usage_entropy/block3", "effective_draws"} <= set(found)
    assert "route_kl/block3" not in found and found["dead_experts"].n == 24
    entropies = [found[f"usage_entropy/block{block}"].value for block in (1, 2, 3)]
    assert found["least_usage_entropy"].value == min(entropies) and 0 < min(entropies) <= math.log(8) + 1e-6
    assert 1 <= found["effective_draws"].value <= 4
    assert not [row for row in groups[setting_of("pairs-L4"), "mdlm"] if row.metric.startswith(("usage", "dead"))]

    (table,) = scaling_tables(results)
    assert table.header == ["Ties", "Variant", "L = 2", "L = 4"]
    assert [line[1] for line in table.rows] == ["mdlm", "plus", "wake-sleep-row", "chance"]
    for line in table.rows:
        assert all(plain(text) in done.out for text in line)
    assert "All with `backbone.heads=2" in done.out and "train.steps=3" in done.out
    (health,) = health_tables(results)
    assert [line[:3] for line in health.rows] == [["pairs", "4", "plus"], ["pairs", "4", "wake-sleep-row"]]

    before, text = trained_files("scaling"), Path("results/scaling.json").read_bytes()
    again = reproduce("scaling", SCALING)
    assert again.code == 0 and again.out == done.out
    assert trained_files("scaling") == before and Path("results/scaling.json").read_bytes() == text

    # What is there is shown when the time is up; what is not is said.
    more = reproduce("scaling", SCALING.replace("pairs", "sums,pairs") + " --budget 0")
    assert more.code == 0 and more.out == done.out and trained_files("scaling") == before
    assert "6 of 12 runs not run: the budget is used up; the same command continues" in more.err


def test_held_out_from_end_to_end(reproduce: Reproduce) -> None:
    done = reproduce("held-out", HELD)
    assert done.code == 0 and not done.err
    results = Results.load("results/held-out.json")
    for metric in ("kl", "overlap", "validity", "nll"):
        assert len(results.select(metric=metric, convention="exact")) == 2 * 2 * 2 * 2  # densities, methods, seeds, NFE
    assert not results.select(convention=None, metric=("overlap", "validity"))  # nothing is drawn

    run = load_run(next(Path("runs/held-out").glob("toy-8modes-emoe-plus-seed1-*")), device="cpu")
    (again,) = [row for row in exact_rows(run.method, run.domain, run.experiment, [2]) if row.metric == "kl"]
    (kept,) = results.select(method="emoe-plus", data=run.domain.name, seed=1, nfe=2, metric="kl")
    assert kept.value == pytest.approx(again.value)

    (table,) = held_out_tables(results)
    assert "train.steps=3" in table.note and "domain.density" not in table.note
    assert table.header == ["Density", "of the exact law", "E-MoE", "E-MoE+", "E-MoE+ − E-MoE"]
    assert [line[0] for line in table.rows] == ["letter"] * 4 + ["pinwheel"] * 4
    assert all(plain(text) in done.out for line in table.rows for text in line)
    assert done.out.rstrip().endswith(table.note)

    before, text = trained_files("held-out"), Path("results/held-out.json").read_bytes()
    assert reproduce("held-out", HELD) == done
    assert trained_files("held-out") == before and Path("results/held-out.json").read_bytes() == text
    # A run whose folder is lost is trained again, and only that one.
    for path in sorted(run.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert reproduce("held-out", HELD).out == done.out
    changed = {name for name, when in trained_files("held-out").items() if before[name] != when}
    assert changed and all(name.startswith(f"{run.path}/") for name in changed)


@pytest.mark.parametrize(
    ("study", "words", "count"), [("scaling", "--lengths 2,64 --families sums", 6), ("held-out", "--seeds 0", 10)]
)
def test_no_time_at_all(study: str, words: str, count: int, reproduce: Reproduce) -> None:
    done = reproduce(study, f"{words} --budget 0")
    assert done.code == 0 and f"{count} of {count} runs not run: the budget is used up" in done.err
    assert done.out == "nothing is measured yet\n"
    assert not Path("runs").exists() and not Path("results/figures").exists()
    assert Results.load(f"results/{study}.json").rows == []


def test_a_run_that_fails_is_told_and_stops_no_other(reproduce: Reproduce) -> None:
    words = "--lengths 2 --families pairs --variants mdlm --optim.lr 1e30 --optim.warmup 0 --domain.points 50"
    done = reproduce("scaling", words, [*TINY, "--train.steps", "25"])
    assert done.code == 1 and "mdlm, pairs-L2, seed 0 failed: step 2" in done.err
    assert done.out == "nothing is measured yet\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("scaling --variants plsu", f"variants: 'plsu' is not known; allowed: {', '.join(VARIANTS)}"),
        ("scaling --families pears", "families: 'pears' is not known; allowed: pairs, copies, sums, permutations, bl"),
        ("scaling --lengths 2,x", "lengths: expected whole numbers"),
        ("scaling --lengths 1", "lengths: must be >= 2"),
        ("scaling --lengths 5 --families pairs,sums", "sums cannot cut 5 positions"),
        ("scaling --depth 1", "depth: must be >= 2"),
        ("scaling --domain.length 4", "domain.length: the study sets it; use --lengths"),
        ("scaling --backbone.depth=4", "backbone.depth: the study sets it; use --depth"),
        ("scaling --train.stps 4", "did you mean 'train.steps'?"),
        ("scaling --seeds one", "seeds: expected whole numbers"),
        ("scaling --budget soon", "budget: expected minutes"),
        ("held-out --methods emoe,emo", "methods: 'emo' is not known; allowed: emoe, emoe-plus, mdlm, vadd, vadd-plus"),
        ("held-out --densities moons", f"densities: 'moons' is not known; allowed: {', '.join(HELD_OUT)}"),
        ("held-out --domain.density letter", "domain.density: the study sets it; use --densities"),
        ("held-out --jobs 99", "jobs: must be"),
    ],
)
def test_refused_before_anything_is_written(words: str, told: str, reproduce: Reproduce) -> None:
    study, _, rest = words.partition(" ")
    done = reproduce(study, rest, ["--device", "cpu"])
    assert done.code == 2 and told in done.err and "Traceback" not in done.err
    assert list(Path.cwd().iterdir()) == []


def test_help_lists_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  held-out  " in shown and "  scaling  " in shown
    for study, flag in (("held-out", "--methods"), ("scaling", "--variants")):
        assert main(["reproduce", study, "--help"]) == 0
        shown = capsys.readouterr().out
        assert flag in shown and "--budget" in shown and "--seeds" in shown


# What is read from a training log


def test_health_of_the_routing() -> None:
    lines = [
        {"step": 1, "loss": 3.0, "route_kl/block1": 0.2, "usage/block1": [1.0, 0.0, 0.0, 0.0],
         "route_kl/block2": 0.0, "usage/block2": [0.25] * 4, "effective_draws": 2.0},
        {"step": 2, "loss": 3.0, "route_kl/block1": 0.4, "usage/block1": [0.0, 0.96, 0.04, 0.0],
         "route_kl/block2": "nan", "usage/block2": [0.25] * 4, "effective_draws": 3.0},
    ]  # fmt: skip
    found = {item.metric: item for item in routing_health(lines)}
    assert found["route_kl/block1"].value == pytest.approx(0.3) and found["route_kl/block2"].n == 1
    mixed = -(0.5 * math.log(0.5) + 0.48 * math.log(0.48) + 0.02 * math.log(0.02))
    assert found["usage_entropy/block1"].value == pytest.approx(mixed) == found["least_usage_entropy"].value
    assert found["usage_entropy/block2"].value == pytest.approx(math.log(4))
    assert (found["dead_experts"].value, found["dead_experts"].n) == (2, 8)  # 0.02 and 0 are below 1/40
    assert found["effective_draws"].value == 2.5
    assert routing_health([{"step": 1, "loss": 3.0}]) == [] == routing_health([])
    log = Path("metrics.jsonl")
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(30)))
    assert [line["step"] for line in last_lines(log)] == list(range(20, 30))


# Tables


def test_table_of_held_out_densities() -> None:
    rows = []
    for seed, usual, plus in ((0, 0.5, 0.3), (1, 0.7, 0.6)):
        rows += [exact_row("emoe", "kl", usual, seed=seed), exact_row("emoe-plus", "kl", plus, seed=seed)]
        rows += [exact_row("emoe", "overlap", 80, seed=seed), exact_row("emoe-plus", "overlap", 79 + seed, seed=seed)]
    rows += [exact_row("emoe", "kl", 1.0, data="pinwheel"), exact_row("emoe-plus", "kl", 1.5, data="pinwheel")]
    rows += [exact_row("emoe", "kl", 9.0, nfe=4), exact_row("emoe", "kl", 2.0, data="two-spirals")]
    said = markdown(held_out_tables(made(rows))).replace("\N{NO-BREAK SPACE}", " ")
    assert "| Density | of the exact law | E-MoE | E-MoE+ | E-MoE+ − E-MoE |" in said
    kl = "KL(data \\|\\| model) (nats), NFE 1"
    assert f"| letter | {kl} | 0.600 ±0.100 | 0.450 ±0.150 | −0.150 ±0.050 |" in said  # paired: -0.2 and -0.1
    assert "| letter | Overlap (%), NFE 1 | 80.0 ±0.0 | 79.5 ±0.5 | −0.5 ±0.5 |" in said
    assert f"| pinwheel | {kl} | 1.000 | 1.500 | +0.500 |" in said
    assert f"| two-spirals | {kl} | 2.000 | — | — |" in said
    assert "9.000" not in said  # NFE 4 is recorded, not shown
    assert "E-MoE+ is better than E-MoE: KL at NFE 1 in 1 of 2, overlap at NFE 1 in 0 of 1 densities." in said
    assert "over seeds (0, 1)" in said and "`train.steps=8000`, commit `0123456789ab` on a GPU" in said


def test_settings_of_held_out_runs_do_not_mix() -> None:
    rows = [exact_row("emoe", "kl", 1.0), exact_row("emoe", "kl", 3.0, more="train.steps=5")]
    said = markdown(held_out_tables(made(rows)))
    first, second = said.index("With `train.steps=5`"), said.index("With `train.steps=8000`")
    assert first < said.index("| 3.000 |") < second < said.index("| 1.000 |")
    assert "better" not in said


def test_tables_of_scaling() -> None:
    rows = []
    for seed, value in ((0, 90.0), (1, 92.0)):
        rows += [ties_row("ties", value, seed=seed), ties_row("coverage", 97.0, seed=seed)]
        rows += [ties_row("dead_experts", seed, n=40, seed=seed), ties_row("least_usage_entropy", 1.5, seed=seed)]
        rows += [ties_row("coordination_gain", 0.25, seed=seed, convention="bound@1")]
    rows += [ties_row("effective_draws", 2.25), ties_row("ties", 50.0, data="sums-L64")]
    rows += [ties_row("ties", 12.0, variant="mdlm"), ties_row("ties", 13.0, variant="mdlm", data="pairs-L64")]
    rows += [ties_row("ties", 12.5, method="ideal", recipe="reference", seed=None)]
    results = made(rows)
    table = markdown(scaling_tables(results)).replace("\N{NO-BREAK SPACE}", " ")
    assert "| Ties | Variant | L = 4 | L = 64 |" in table
    assert "| pairs | mdlm | 12.0 | 13.0 |" in table
    assert "| pairs | plus | 91.0 ±1.0 (97.0) | — |" in table
    assert "| pairs | chance | 12.5 | — |\n| sums | plus | — | 50.0 |" in table
    assert "mdlm is `ties-mdlm`, plus is `ties-emoe-plus`" in table and "All with" not in table
    health = markdown(health_tables(results)).replace("\N{NO-BREAK SPACE}", " ")
    # The largest L at which a model has a latent.
    assert "| pairs | 4 | plus | +0.250 ±0.000 | 1.50 ±0.00 | 2.25 | 0.5 of 40 |" in health
    assert "| mdlm |" not in health


def test_further_changes_stand_in_names_unless_all_share_them() -> None:
    results = made([ties_row("ties", 1.0, more="train.steps=5"), ties_row("ties", 2.0, variant="all-carry")])
    assert {label for _, label in by_variant(results)} == {"plus train.steps=5", "all-carry"}
    alike = [ties_row("ties", 1.0, variant=name, more="train.steps=5") for name in ("plus", "all-carry")]
    shared = made(alike, "s.json")
    assert {label for _, label in by_variant(shared)} == {"plus", "all-carry"}
    (table,) = scaling_tables(shared)
    assert "All with `train.steps=5`." in table.note
    assert "all-carry is `ties-emoe-plus method.carriers=all`" in table.note


def test_depths_do_not_mix() -> None:
    other = ties_row("ties", 3.0, more="backbone.depth=8")
    assert [label for _, label in by_variant(made([other]))] == ["plus"]
    both = by_variant(made([other, ties_row("ties", 2.0)]))  # the file has one of them already
    assert {label: [row.value for row in rows] for (_, label), rows in both.items()} == {
        "plus": [2.0], "plus backbone.depth=8": [3.0]
    }  # fmt: skip
