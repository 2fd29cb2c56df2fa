"""Recipes for text: published settings and sizes; a tiny text through the commands: train, draw, fill in, measure."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from emoe import console as progress
from emoe.backbones.base import active_parameters, total_parameters
from emoe.backbones.dit import DiTConfig
from emoe.cli import main
from emoe.completion import check_beginnings
from emoe.config import ConfigError
from emoe.domains.text.data import TextConfig
from emoe.evaluation import likelihood
from emoe.evaluation.evaluate import method_name
from emoe.experiment import Experiment, differences
from emoe.methods.bd3lm import BD3LMConfig
from emoe.methods.emoe import EMoEConfig
from emoe.recipes import get_recipe
from emoe.reporting.results import known_methods
from emoe.runs import Run, load_run
from emoe.types import TokenSpace

LM1B = TokenSpace(size=30_522, mask_id=103, length=128)
METHODS = ("mdlm", "vadd", "emoe", "emoe-plus", "ar", "sedd", "bd3lm")
MASKED = tuple(method for method in METHODS if method != "ar")
STEPS = 1_000_000

Command = Callable[..., tuple[int, str, str]]


# --- Published settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "total", "active"),
    [
        ("mdlm", 139_292_986, 139_292_986),
        ("sedd", 139_292_986, 139_292_986),
        ("bd3lm", 139_292_986, 139_292_986),
        ("ar", 131_912_250, 131_912_250),
        ("vadd", 256_492_986, 256_492_986),
        ("emoe", 536_051_002, 139_366_714),
        ("emoe-plus", 536_051_002, 139_366_714),
        ("emoe-aware", 536_051_002, 139_366_714),
    ],
)
def test_networks_have_the_published_sizes(method: str, total: int, active: int) -> None:
    experiment = get_recipe(f"lm1b-{method}")
    with torch.device("meta"):
        built = experiment.method.build(LM1B, experiment.backbone)
    assert (total_parameters(built), active_parameters(built)) == (total, active)


@pytest.mark.parametrize("family", ["lm1b", "news-small", "text-tiny"])
def test_the_recipes_of_a_family_differ_in_their_method_alone(family: str) -> None:
    first, *others = (get_recipe(f"{family}-{method}") for method in METHODS)
    for other in others:
        assert (other.domain, other.optim, other.train) == (first.domain, first.optim, first.train)
        assert (other.eval.samples, other.eval.batch) == (first.eval.samples, first.eval.batch)
        kind = other.method.kind
        named = {"causal": kind == "ar", "time_conditioning": kind == "sedd"}
        assert {**vars(other.backbone)} == {**vars(first.backbone), **named}


def test_lm1b_is_trained_as_published() -> None:
    experiment = get_recipe("lm1b-emoe")
    optim, training, network = experiment.optim, experiment.train, experiment.backbone
    assert (training.steps, training.batch, training.ema, training.precision) == (STEPS, 512, 0.9999, "bf16")
    assert (optim.algorithm, optim.betas, optim.weight_decay, optim.clip) == ("adamw", (0.9, 0.999), 0.0, 1.0)
    rates = [optim.lr_at(step, STEPS) for step in (0, 1_249, 2_499, 2_500, STEPS - 1)]
    assert rates == pytest.approx([3e-4 / 2_500, 1.5e-4, 3e-4, 3e-4, 3e-4])
    assert isinstance(network, DiTConfig)
    assert (network.width, network.depth, network.heads, network.hidden) == (768, 12, 12, 3072)
    assert (network.cond_size, network.dropout, network.time_conditioning) == (128, 0.1, False)
    assert experiment.eval.samples == 2_000 and experiment.domain == TextConfig(path="sets/lm1b")


def test_weights_and_temperature_on_lm1b() -> None:
    method, vadd = get_recipe("lm1b-emoe").method, get_recipe("lm1b-vadd").method
    assert isinstance(method, EMoEConfig)
    assert (method.experts, method.top_k, method.balance, method.gradient) == (8, 2, 0.0, "top-k")
    for step in (0, 10_000, 76_000, 77_000, STEPS):
        assert method.relax_tau(step, STEPS) == pytest.approx(max(0.1, math.exp(-3e-5 * step)))
        assert method.kl_weight(step, STEPS) == 1
    assert [vadd.kl_weight(step, STEPS) for step in (0, 50_000, 100_000, STEPS)] == [0, 0.5, 1, 1]
    assert vadd.latent == 512
    block = get_recipe("lm1b-bd3lm").method
    assert isinstance(block, BD3LMConfig) and block.block == 16


def test_the_guide_tells_the_sizes_of_the_networks() -> None:
    guide = (Path(__file__).parents[1] / "docs/guides/text.md").read_text(encoding="utf-8")
    line = next(line for line in guide.splitlines() if line.startswith("| `news-small-*`"))
    space = TokenSpace(size=30_522, mask_id=103, length=128)
    with torch.device("meta"):
        sizes = [total_parameters(get_recipe(f"news-small-{name}").build_method(space)) for name in ("mdlm", "emoe")]
    assert "{:.1f}M, E-MoE {:.1f}M".format(*(size / 1e6 for size in sizes)) in line


def test_the_plus_recipes_differ_from_the_paper_s_in_what_keeps_blocks_in_use() -> None:
    for family in ("lm1b", "news-small", "text-tiny"):
        plain, plus = (get_recipe(f"{family}-{name}") for name in ("emoe", "emoe-plus"))
        changed = {".".join(line.split(":")[0].split(".")[:2]) for line in differences(plain, plus)}
        options = ("balance", "balance_form", "usage_floor", "free_nats", "free_every", "elbo_power")
        assert changed <= {"name", *(f"method.{name}" for name in options)}
        assert isinstance(plus.method, EMoEConfig) and plus.method.balance_form == "floor"
        assert plus.method.usage_floor < math.log(plus.method.experts) and plus.method.free_nats > 0


def test_the_aware_recipes_are_the_plus_ones_whose_network_is_told_the_number_of_steps() -> None:
    for family in ("lm1b", "news-small", "text-tiny"):
        plus, aware = (get_recipe(f"{family}-{name}") for name in ("emoe-plus", "emoe-aware"))
        changed = {line.split(":")[0] for line in differences(plus, aware)}
        told = {"name", "method.step_aware", "method.free_nats", "backbone.time_conditioning"}
        # Rows of one step are masked throughout, so that no share of the logits is left out.
        large = {"method.head_share", "method.free_every"}
        assert changed == (told if family == "text-tiny" else told | large)
        assert method_name(aware) == "emoe-aware" and known_methods()["emoe-aware"].label == "E-MoE, step-aware"


@pytest.mark.parametrize(("family", "length"), [("lm1b", 128), ("news-small", 128), ("text-tiny", 16)])
def test_samples_are_asked_for_at_steps_that_a_method_can_make(family: str, length: int) -> None:
    assert get_recipe(f"{family}-ar").eval.nfe == (length,)
    blocks = get_recipe(f"{family}-bd3lm")
    assert isinstance(blocks.method, BD3LMConfig) and blocks.eval.nfe[-1] == length
    assert all(nfe % (length // blocks.method.block) == 0 for nfe in blocks.eval.nfe)
    assert (
        get_recipe(f"{family}-sedd").eval.nfe
        == get_recipe(f"{family}-mdlm").eval.nfe
        == (*(2**k for k in range(length.bit_length())),)
    )


# --- A tiny text -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared set of rows of 16 tokens."""
    root = tmp_path_factory.mktemp("text")
    words = "the a cat dog bird sees hears small old . $".split()
    (root / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    draw = random.Random(0)
    lines = (
        f"The {draw.choice(['small', 'old'])} {draw.choice(['cat', 'dog'])} {draw.choice(['sees', 'hears'])} a bird."
        for _ in range(400)
    )
    (root / "animals.txt").write_text("\n".join(lines) + "\n")
    words = ["--tokenizer", str(root / "vocab.txt"), "--length", "16", "--split", "0.1,0.1", "--jobs", "1", "--quiet"]
    pytest.importorskip("tokenizers")
    assert main(["data", "prepare", str(root / "animals.txt"), "--out", str(root / "set"), *words]) == 0
    return root


@pytest.fixture(scope="module")
def folders(place: Path) -> dict[str, Path]:
    """Runs of every method: MDLM and E-MoE are trained for a while, the others for a step."""
    for method in METHODS:
        steps = {"mdlm": 150, "emoe": 20}.get(method, 1)
        words = f"train text-tiny-{method} --domain.path {place / 'set'} --run {place / method} --device cpu --quiet"
        assert main([*words.split(), "--train.steps", str(steps), "--train.batch", "16", "--eval.batch", "7"]) == 0
    return {method: place / method for method in METHODS}


@pytest.fixture(scope="module")
def mdlm(folders: dict[str, Path]) -> Run:
    return load_run(folders["mdlm"], device="cpu")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything happens in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.mark.parametrize("name", ["lm1b-emoe", "news-small-ar", "text-tiny-mdlm"])
def test_a_recipe_without_its_text(name: str, command: Command, empty_folder: Path) -> None:
    experiment = get_recipe(name)
    assert isinstance(experiment, Experiment) and isinstance(experiment.domain, TextConfig)
    assert command("list", name)[0] == 0
    code, out, err = command("train", name, "--device", "cpu")
    path = experiment.domain.path
    assert code == 3 and not out and err.count("\n") == 1
    assert f"emoe train: {path}: does not exist; --domain.path takes a folder" in err
    assert f"emoe data prepare FILES --tokenizer FILE --out {path}" in err
    assert list(empty_folder.iterdir()) == []


def test_samples_are_text(folders: dict[str, Path], command: Command) -> None:
    words = {"the", "a", "cat", "dog", "bird", "bird.", "sees", "hears", "small", "old", "[CLS]"}
    code, out, _ = command("sample", folders["mdlm"], "--n", 3, "--nfe", 16, "--device", "cpu")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3 and all(set(line.split()) & words for line in lines)
    assert sum(word in words for line in lines for word in line.split()) > 25  # words, not numbers
    code, out, _ = command("sample", folders["mdlm"], "--n", 3, "--nfe", 16, "--device", "cpu", "--json")
    told = json.loads(out)
    assert code == 0 and told["text"] == lines and len(told["samples"][0]) == 16
    code, out, err = command("sample", folders["mdlm"], "--n", 3, "--nfe", 16, "--device", "cpu", "--out", "pool")
    assert code == 0 and not out and np.load("pool.npy").tolist() == told["samples"]


@pytest.mark.parametrize("method", MASKED)
def test_holes_are_filled_and_words_stay(method: str, folders: dict[str, Path], command: Command) -> None:
    text = "the {2} sees a [MASK]. [CLS]"
    words = ["--given", text, "--n", 10, "--nfe", 16, "--device", "cpu", "--json"]
    code, out, _ = command("sample", folders[method], *words)
    told = json.loads(out)
    rows = torch.tensor(told["samples"])
    given = torch.tensor(told["given"])
    assert code == 0 and given.shape == (1, 16) and rows.shape == (10, 16)
    assert (given >= 0).sum() == 5 and ((given == rows) | (given < 0)).all()
    assert (rows != 4).all()  # no mask is left
    assert len({tuple(row) for row in told["samples"]}) > 1
    run = load_run(folders[method], device="cpu")
    found = run.complete(text, 10, 16)
    assert torch.equal(found.samples[0], rows) and found.texts == [told["text"]]


def test_a_trained_model_knows_what_is_missing(mdlm: Run) -> None:
    texts = mdlm.complete("the [MASK] cat sees a bird. [CLS] the old ___", 20, 16).texts[0]
    fitting = sum(text.startswith(("the small cat sees", "the old cat sees")) for text in texts)
    assert fitting >= 16  # by chance: 2 of 15 words


def test_files_of_texts_are_filled_in_together(folders: dict[str, Path], command: Command) -> None:
    Path("holes.txt").write_text("the old [MASK] hears a bird.\n\n___ sees a bird.\n")
    words = ["--given", "holes.txt", "--n", 3, "--nfe", 4, "--device", "cpu", "--picture", "x.png"]
    code, out, _ = command("sample", folders["emoe"], *words)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 6 and Path("x.png").stat().st_size > 1000
    assert all(line.startswith("the old ") and " hears a bird." in line for line in lines[:3])
    assert all(line.endswith("sees a bird.") for line in lines[3:])
    code, out, _ = command(
        "sample", folders["emoe"], "--given", "holes.txt", "--keep", "0", "--n", 1, "--device", "cpu"
    )
    assert code == 2  # the second line has no token there
    code, out, _ = command("sample", folders["emoe"], "--given", "the old cat", "--keep", "0", "--n", 2, "--json")
    assert code == 0 and json.loads(out)["given"][0][:2] == [5, -1]


@pytest.mark.parametrize("method", ["mdlm", "ar", "bd3lm"])
def test_beginnings_are_continued(method: str, folders: dict[str, Path], command: Command) -> None:
    words = ["--continue", "The old dog", "a", "--n", 2, "--nfe", 16, "--device", "cpu"]
    code, out, _ = command("sample", folders[method], *words)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 4 and all(line.startswith("the old dog") for line in lines[:2])
    assert all(line.startswith("a") for line in lines[2:])


@pytest.mark.parametrize(
    ("method", "words", "fragment"),
    [
        ("mdlm", ["--continue", "the [MASK] cat"], "continue: row 0 has a hole before its last word; use --given"),
        ("mdlm", ["--continue", "a", "--given", "b"], "continue: is another way of giving rows"),
        ("mdlm", ["--given", "the cat " * 9], "takes 18 tokens with its holes, but a row has 16"),
        ("mdlm", ["--given", "the cat", "--keep", "0-3"], "keep: position 2 is to stay, but given row 0 has no token"),
        (
            "ar",
            ["--given", "the [MASK] cat", "--nfe", "16"],
            "given: 'ar' continues rows; given tokens must come first",
        ),
        ("ar", ["--nfe", "3"], "nfe: 'ar' needs one call per token: steps = 16, got 3"),
    ],
)
def test_refused(method: str, words: list[str], fragment: str, folders: dict[str, Path], command: Command) -> None:
    code, out, err = command("sample", folders[method], "--device", "cpu", *words)
    assert code == 2 and not out and fragment in err and err.count("\n") == 1


def test_calls_that_are_not_named(folders: dict[str, Path], command: Command) -> None:
    """As many as the recipe's evaluation begins with: one, or the fewest that a method can do with."""
    for method, nfe in {"mdlm": 1, "ar": 16, "bd3lm": 4}.items():
        code, out, _ = command("sample", folders[method], "--n", 1, "--device", "cpu", "--json")
        assert code == 0 and json.loads(out)["nfe"] == nfe


def test_beginnings_of_rows() -> None:
    space = TokenSpace(size=5, mask_id=4, length=3)
    check_beginnings(torch.tensor([[1, 2, 4], [1, 4, 4], [4, 4, 4]]), space)
    with pytest.raises(ConfigError, match="continue: row 1 has a hole"):
        check_beginnings(torch.tensor([[1, 2, 4], [1, 4, 2]]), space)


@pytest.mark.parametrize(
    ("method", "conventions"),
    [
        ("mdlm", "bound@2 nelbo"),
        ("emoe", "bound@1 iw@1,2"),
        ("ar", "exact"),
        ("sedd", "nelbo"),
        ("bd3lm", "nelbo bound@1"),
    ],
)
def test_test_perplexity(method: str, conventions: str, folders: dict[str, Path], command: Command) -> None:
    nfe = "16" if method == "ar" else "4"
    words = ["--nfe", nfe, "--samples", 8, "--rows", 20, "--likelihood", conventions, "--device", "cpu"]
    code, out, _ = command("eval", folders[method], *words, "--json")
    rows = json.loads(out)
    assert code == 0 and {row["task"] for row in rows} == {"text"}
    assert {row["nfe"] for row in rows if row["convention"] is None} == {int(nfe)}
    for convention in conventions.split():
        found = {row["metric"]: row for row in rows if row["convention"] == convention}
        nats = found["nll"]["value"] / 16
        assert found["ppl"]["value"] == pytest.approx(math.exp(nats)) and found["nll"]["n"] == 20
        assert found["bpd"]["value"] == pytest.approx(nats / math.log(2)) and 0 < nats < 4


def test_perplexity_is_printed_with_its_convention(folders: dict[str, Path], command: Command) -> None:
    words = ["--nfe", 16, "--samples", 8, "--rows", 20, "--likelihood", "exact", "--device", "cpu"]
    code, out, _ = command("eval", folders["ar"], *words)
    table = out[out.index("Likelihood") :]
    assert code == 0 and all(name in table for name in ("nats per token", "perplexity", "the NLL itself"))
    assert out.count("exact") == 1 and "±" not in table  # in one table, and without an error


def test_likelihoods_of_large_vocabularies_are_made_of_few_rows_at_a_time(
    mdlm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a call are so many that the logits stay below a limit."""
    sizes: list[int] = []
    honest = type(mdlm.method).nll_bound

    def seen(self: object, x0: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(len(x0))
        return honest(self, x0, *rest)

    monkeypatch.setattr(type(mdlm.method), "nll_bound", seen)
    rows, name = mdlm.domain.fresh(20, 0), likelihood.Convention.parse("bound@1")
    likelihood.estimate_nll(mdlm.method, rows, name, repeats=1)
    monkeypatch.setattr(likelihood, "LOGITS", 7 * 16 * mdlm.method.space.size)
    likelihood.estimate_nll(mdlm.method, rows, name, repeats=1)
    assert sizes == [20, 7, 7, 6]


# --- Progress ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--n", 10], ["--given", "the ___ .", "a", "--n", 5]])
@pytest.mark.parametrize("method", ["mdlm", "ar"])
def test_sampling_shows_its_progress(
    method: str, words: list[object], folders: dict[str, Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of at most 7 rows: 32 network calls."""
    if method == "ar" and "--given" in words:
        words = ["--continue", "the", "a", "--n", 5]
    words = ["sample", folders[method], "--nfe", 16, "--device", "cpu", *words]
    code, quick, err = command(*words)
    assert code == 0 and not err  # over before a line is due
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    code, out, err = command(*words)
    lines = err.splitlines()
    assert code == 0 and out == quick and len(lines) == 32
    assert f"{folders[method]}: step 1/32 (3.1%)" in lines[0] and "step 32/32 (100.0%)" in lines[-1]
    assert "ETA 0:00:00" in lines[-1]
    assert command(*words, "--quiet")[2] == ""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (1e9, False)])
def test_a_bar_may_wait(patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress.meter(2, "label", patience=patience) as tick:
        tick(1, "")
        tick(1, "")
    assert ("label" in stream.getvalue()) == shown
