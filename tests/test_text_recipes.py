"""Recipes for text: published settings and sizes; a tiny text that is learned, drawn and filled in."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from small import Settings, trained

from emoe.backbones.base import active_parameters, total_parameters
from emoe.config import ConfigError
from emoe.domains.base import DataError
from emoe.evaluation import measure
from emoe.evaluation.measure import estimate_nll, measure_likelihoods
from emoe.methods.bd3lm import BD3LMConfig
from emoe.methods.emoe import EMoEConfig
from emoe.recipes import get_recipe
from emoe.runs.run import Run
from emoe.types import Likelihood, TokenSpace

LM1B = TokenSpace(size=30_522, mask_id=103, length=128)
METHODS = ("mdlm", "vadd", "emoe", "emoe-free-nats", "ar", "sedd", "bd3lm")
STEPS = 1_000_000


def test_networks_have_the_published_sizes() -> None:
    sizes = dict.fromkeys(METHODS, (139_292_986, 139_292_986))
    sizes |= {"ar": (131_912_250, 131_912_250), "vadd": (256_492_986, 256_492_986)}
    sizes |= dict.fromkeys(("emoe", "emoe-free-nats"), (536_051_002, 139_366_714))
    for method, size in sizes.items():
        experiment = get_recipe(f"lm1b-{method}")
        with torch.device("meta"):
            built = experiment.method.build(LM1B, experiment.backbone)
        assert (total_parameters(built), active_parameters(built)) == size, method


@pytest.mark.parametrize(("family", "length"), [("lm1b", 128), ("news-small", 128), ("text-tiny", 16)])
def test_recipes_of_a_family_differ_in_their_method_alone(family: str, length: int) -> None:
    recipes = {method: get_recipe(f"{family}-{method}") for method in METHODS}
    first = recipes["mdlm"]
    for method, other in recipes.items():
        assert (other.domain, other.optim, other.train) == (first.domain, first.optim, first.train)
        network = {"causal": method == "ar", "time_conditioning": method == "sedd"}
        assert vars(other.backbone) == vars(first.backbone) | network
        # Samples are asked for at numbers of steps that a method can make.
        if method == "bd3lm":
            assert isinstance(other.method, BD3LMConfig) and other.eval.nfe[-1] == length
            assert all(nfe % (length // other.method.block) == 0 for nfe in other.eval.nfe)
        else:
            powers = tuple(2**k for k in range(length.bit_length()))
            assert other.eval.nfe == ((length,) if method == "ar" else powers)


def test_lm1b_is_trained_as_published() -> None:
    """Constants of recipes are compared with stored ones in test_golden.py."""
    experiment = get_recipe("lm1b-emoe")
    rates = [experiment.optim.lr_at(step, STEPS) for step in (0, 1_249, 2_499, 2_500, STEPS - 1)]
    assert rates == pytest.approx([3e-4 / 2_500, 1.5e-4, 3e-4, 3e-4, 3e-4])
    assert isinstance(experiment.method, EMoEConfig)
    for step in (0, 10_000, 76_000, 77_000, STEPS):
        assert experiment.method.relax_tau(step, STEPS) == pytest.approx(max(0.1, math.exp(-3e-5 * step)))
        assert experiment.method.kl_weight(step, STEPS) == 1
    vadd = get_recipe("lm1b-vadd").method
    assert [vadd.kl_weight(step, STEPS) for step in (0, 50_000, 100_000, STEPS)] == [0, 0.5, 1, 1]  # type: ignore[attr-defined]


def test_the_guide_tells_the_sizes_of_the_networks() -> None:
    guide = (Path(__file__).parents[1] / "docs/guides/text.md").read_text(encoding="utf-8")
    line = next(line for line in guide.splitlines() if line.startswith("| `news-small-*`"))
    with torch.device("meta"):
        sizes = [total_parameters(get_recipe(f"news-small-{name}").build_method(LM1B)) for name in ("mdlm", "emoe")]
    assert "{:.1f}M, E-MoE {:.1f}M".format(*(size / 1e6 for size in sizes)) in line


def test_a_recipe_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="sets/lm1b: does not exist; --domain.path takes a folder .*emoe data prepare"):
        trained("lm1b-emoe", Path("run"), {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of every method on rows of 16 tokens: MDLM is trained for a while, the others for a step."""
    pytest.importorskip("tokenizers")
    from emoe.domains.text.prepare import PrepareConfig, prepare

    root = tmp_path_factory.mktemp("text")
    words = "the a cat dog bird sees hears small old . $".split()
    (root / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    draw = random.Random(0)
    lines = [
        f"The {draw.choice(['small', 'old'])} {draw.choice(['cat', 'dog'])} {draw.choice(['sees', 'hears'])} a bird."
        for _ in range(400)
    ]
    (root / "animals.txt").write_text("\n".join(lines) + "\n")
    config = PrepareConfig(length=16, split=(0.1, 0.1), jobs=1)
    prepare(root / "set", root / "vocab.txt", [root / "animals.txt"], config=config)
    settings: Settings = {"domain.path": str(root / "set"), "train.batch": 16, "eval.batch": 7}
    steps = {method: {"train.steps": 150 if method == "mdlm" else 1} for method in METHODS}
    return {method: trained(f"text-tiny-{method}", root / method, settings | steps[method]) for method in METHODS}


def test_a_trained_model_knows_what_is_missing(runs: dict[str, Run]) -> None:
    mdlm = runs["mdlm"]
    texts = mdlm.complete("the [MASK] cat sees a bird. [CLS] the old ___", 20, 16).texts[0]
    fitting = sum(text.startswith(("the small cat sees", "the old cat sees")) for text in texts)
    assert fitting >= 16  # by chance: 2 of 15 words
    known = {"the", "a", "cat", "dog", "bird", "bird.", "sees", "hears", "small", "old", "[CLS]"}
    lines = mdlm.experiment.domain.write(mdlm.sample(3, 16))
    assert sum(word in known for line in lines for word in line.split()) > 25  # words, not numbers


@pytest.mark.parametrize("method", METHODS)
def test_holes_are_filled_and_words_stay(method: str, runs: dict[str, Run]) -> None:
    run = runs[method]
    assert run.default_nfe == {"ar": 16, "bd3lm": 4}.get(method, 1)
    if method == "ar":
        with pytest.raises(ConfigError, match="given: .* given tokens must come first"):
            run.complete("the {2} sees a [MASK]. [CLS]", 1, 16)
        with pytest.raises(ConfigError, match="nfe: .* needs one call per token"):
            run.sample(1, 3)
    text = "the old dog" if method == "ar" else "the {2} sees a [MASK]. [CLS]"
    completion = run.complete(text, 10, 16)
    given, rows = completion.given, completion.samples[0]
    assert given.shape == (1, 16) and rows.shape == (10, 16) and completion.kept.sum() == (3 if method == "ar" else 5)
    assert ((given == rows) | ~completion.kept).all() and (rows != 4).all()  # no mask is left
    assert len({tuple(row) for row in rows.tolist()}) > 1 and len(completion.texts[0]) == 10


LIKELIHOODS = {"mdlm": "bound@2 nelbo", "emoe": "bound@1 iw@1,2", "ar": "exact", "sedd": "nelbo"}


@pytest.mark.parametrize(("method", "names"), (LIKELIHOODS | {"bd3lm": "nelbo bound@1"}).items())
def test_test_perplexity(method: str, names: str, runs: dict[str, Run]) -> None:
    run, wanted = runs[method], [Likelihood.parse(name) for name in names.split()]
    rows = measure_likelihoods(run, wanted, rows=20)
    assert {row.task for row in rows} == {"text"} and {row.convention for row in rows} == set(names.split())
    for name in names.split():
        values = {row.metric: row for row in rows if row.convention == name}
        nats = values["nll"].value / 16
        assert values["ppl"].value == pytest.approx(math.exp(nats)) and values["nll"].n == 20
        assert values["bpd"].value == pytest.approx(nats / math.log(2)) and 0 < nats < 4


def test_likelihoods_of_large_vocabularies_are_made_of_few_rows_at_a_time(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a call are so many that the logits stay below a limit."""
    run, sizes = runs["mdlm"], []
    honest = type(run.method).nll

    def counted(self: object, x0: torch.Tensor, *arguments: object) -> torch.Tensor:
        sizes.append(len(x0))
        return honest(self, x0, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(run.method), "nll", counted)
    rows, bound = run.domain.fresh(20, 0), Likelihood("bound", 1)
    estimate_nll(run.method, rows, bound, repeats=1)
    monkeypatch.setattr(measure, "LOGITS", 7 * 16 * run.method.space.size)
    estimate_nll(run.method, rows, bound, repeats=1)
    assert sizes == [20, 7, 7, 6]
