"""Configuration: configs that load, configs that are refused, and the messages of refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

import emoe.methods
from emoe.backbones.base import BackboneConfig
from emoe.backbones.transformer import TransformerConfig
from emoe.config import Config, ConfigError, Family, from_dict, option, to_dict
from emoe.domains.base import DomainConfig
from emoe.domains.ties import TiesConfig
from emoe.engine.fit import TrainConfig
from emoe.engine.optim import OptimConfig
from emoe.experiment import EvalConfig, Experiment, customise
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.vadd import VADDConfig
from emoe.overrides import as_text, differences, override, paths
from emoe.ramps import Constant, Ramp
from emoe.recipes import all_recipes, get_recipe
from emoe.routing.compare import CompareConfig
from emoe.types import Needs

RECIPES = sorted(all_recipes())


def problems(call: Any, *args: Any) -> list[str]:
    """The lines of the ConfigError of a call."""
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert caught.value.problems and str(caught.value).splitlines() == caught.value.problems
    return caught.value.problems


def changed(path: str, value: Any) -> dict[str, Any]:
    """The dictionary of a recipe with one field replaced."""
    tree = to_dict(get_recipe("toy-8modes-emoe"))
    *parents, last = path.split(".")
    inner = tree
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return tree


@pytest.fixture
def families() -> Iterator[None]:
    """Families as they were before the test, whatever it registers."""
    kept = {family: dict(family.members) for family in (MethodConfig, BackboneConfig, DomainConfig, Ramp)}
    yield
    for family, members in kept.items():
        family.members.clear()
        family.members.update(members)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json_and_the_command_line(name: str) -> None:
    experiment = get_recipe(name)
    again = from_dict(Experiment, json.loads(json.dumps(to_dict(experiment), allow_nan=False)))
    assert again == experiment == override(experiment, {}) and differences(experiment, again) == {}
    assert from_dict(Experiment, to_dict(experiment, sparse=True)) == experiment
    settings = {path: as_text(value) for path, _, _, value in paths(experiment)}
    assert len(settings) > 25 and all(field.metadata["doc"] for _, _, field, _ in paths(experiment))
    # Naming a kind resets the fields of its group, and then all of them are given: nothing may change.
    assert override(experiment, settings) == experiment
    assert override(experiment, {path: value for path, _, _, value in paths(experiment)}) == experiment


RAMP: dict[str, object] = {"kind": "linear", "start": 1}
REFUSED: list[tuple[str, Any, str]] = [
    ("train.step", 5, "train.step: unknown field of TrainConfig; did you mean 'steps'?"),
    ("sed", 5, "sed: unknown field of Experiment; did you mean 'seed'?"),
    ("train.steps", "x" * 10_000, "train.steps: expected whole number >= 1, got 'xxx"),
    ("train.steps", 1.5, "train.steps: expected whole number >= 1, got 1.5"),
    ("train.steps", True, "train.steps: expected whole number >= 1, got True"),
    ("train.cuda_graph", 1, "train.cuda_graph: expected true|false, got 1"),
    ("method", [], "method: expected the fields of MethodConfig, got []"),
    ("train.steps", 0, "train.steps: must be >= 1, got 0"),
    ("eval.nfe", 4, "eval.nfe: expected whole number,... >= 1, got 4"),
    ("optim.lr", math.inf, "optim.lr: must be > 0, got inf"),
    ("optim.lr", 10**400, "optim.lr: expected number > 0, got 1000"),
    ("train.ema", 1, "train.ema: must be >= 0 and <= 0.999999, got 1.0"),
    ("train.accumulate", 3, "train.accumulate: must divide batch = 512, got 3"),
    ("method.top_k", 9, "method.top_k: must be in 1..experts = 8, got 9"),
    ("backbone.time_size", 7, "backbone.time_size: must be even, got 7"),
    ("domain.density", "8modes", "domain.density: got '8modes'; did you mean '8-modes'?"),
    ("method.relax_tau", math.nan, "method.relax_tau.value: must be a finite number, got nan"),
    ("method.relax_tau", "0.5", "method.relax_tau: expected the fields of Ramp, got '0.5'"),
    ("method.relax_tau", {**RAMP, "end": 0}, "method.relax_tau: must be > 0, got 0.0"),
    ("method.relax_tau", RAMP, "method.relax_tau.end: missing; value at the end of the ramp"),
    ("method.relax_tau", {**RAMP, "end": 1, "floor": 1}, "method.relax_tau.floor: unknown field of Linear; "),
    ("method", {"kind": "emo"}, "method.kind: 'emo' is not known; did you mean 'emoe'?"),
    ("method", {}, "method.kind: missing; allowed: "),
    ("backbone", {"kind": "layers"}, "backbone.kind: 'layers' is not known; "),
    ("domain", {"kind": "rows", "path": "x.npy", "key": "a"}, "domain.key: only .npz files hold named arrays"),
]


@pytest.mark.parametrize(("path", "value", "line"), REFUSED)
def test_refused(path: str, value: Any, line: str) -> None:
    lines = problems(from_dict, Experiment, changed(path, value))
    assert len(lines) == 1 and lines[0].startswith(line) and len(lines[0]) < 200


def test_all_problems_are_reported_at_once() -> None:
    tree = changed("train.steps", "many")
    tree["optim"]["lr"], tree["method"]["topk"] = -1, 2
    lines = problems(from_dict, Experiment, tree)
    assert [line.split(":")[0] for line in lines] == ["method.topk", "optim.lr", "train.steps"]


def test_a_config_checks_its_ranges_when_it_is_made_in_python() -> None:
    assert problems(lambda: TrainConfig(steps=0, keep=1)) == ["steps: must be >= 1, got 0", "keep: must be >= 2, got 1"]
    assert problems(lambda: EMoEConfig(relax_tau=Constant(value=0.0))) == ["relax_tau: must be > 0, got 0.0"]
    assert problems(lambda: EvalConfig(nfe=())) == ["nfe: must hold at least one number, such as 1,2,4"]
    assert problems(lambda: OptimConfig(betas=(0.9, 1.0))) == ["betas: must be two numbers in [0, 1), got (0.9, 1.0)"]
    assert problems(lambda: TrainConfig(steps=-(10**400)))[0].startswith("steps: must be >= 1, got -1000")
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 5  # type: ignore[misc]


def test_a_config_checks_its_types_when_it_is_made_in_python() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Paint(Config):
        colours: tuple[Literal["red", "blue"], ...] = option((), doc="colours")
        tau: Ramp = option(Constant(value=1.0), doc="a ramp", above=0)
        share: float = option(0.5, doc="a share", high=1)

    assert Paint(colours=["red"], tau=2, share=1) == Paint(colours=("red",), tau=Constant(value=2.0), share=1.0)  # type: ignore[arg-type]
    lines = problems(lambda: Paint(colours=("red", "blu"), tau="linear", share=True))  # type: ignore[arg-type]
    assert lines == [
        "colours: got 'blu'; did you mean 'blue'?",
        "tau: expected the fields of Ramp, got 'linear'",
        "share: expected number <= 1, got True",
    ]
    with pytest.raises(ConfigError, match="family: got 'pair'; did you mean 'pairs'?"):
        vars(tied := TiesConfig(family="pairs"))["family"] = "pair"  # the tests check the types of arguments before
        tied.__post_init__()


def test_switching_a_family_resets_its_fields() -> None:
    experiment = override(get_recipe("toy-8modes-emoe"), {"method": "vadd"})
    assert experiment.method == VADDConfig()  # t_low = 1/64 was the recipe's choice for E-MoE
    assert override(experiment, {"method": "vadd", "method.latent": "3"}).method == VADDConfig(latent=3)
    assert override(experiment, {"method.latent": "3", "method.kind": "vadd"}).method == VADDConfig(latent=3)
    assert problems(override, experiment, {"method.top-k": "2"})[0].startswith("method.top-k: no such field; ")
    tree = changed("method.kind", "vadd")
    lines = [line.split(":")[0] for line in problems(from_dict, Experiment, tree)]
    assert {"method.experts", "method.top_k", "method.relax_tau"} <= set(lines)


def test_families_of_a_user_are_found_by_kind(families: None) -> None:
    @dataclass(frozen=True, kw_only=True)
    class MyMethodConfig(MethodConfig, kind="my-method"):
        strength: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class MyBackboneConfig(BackboneConfig, kind="my-backbone"):
        supports: ClassVar[frozenset[str]] = frozenset({"experts"})
        size: int = 4

    @dataclass(frozen=True, kw_only=True)
    class MyRamp(Ramp, kind="steps"):
        heights: tuple[float, ...] = (1.0,)

    base = get_recipe("toy-8modes-emoe")
    own = override(base, {"method": "my-method", "method.strength": "2", "backbone": "my-backbone"})
    assert (own.method, own.backbone) == (MyMethodConfig(strength=2.0), MyBackboneConfig())
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(own)))) == own
    assert override(base, {"method.relax-tau": "steps"}).method == dataclasses.replace(
        base.method,
        relax_tau=MyRamp(),  # type: ignore[call-arg]
    )
    assert "my-method" in problems(override, base, {"method": "zzz"})[0]


def test_two_configs_of_one_kind_are_refused_and_the_same_one_is_replaced(
    families: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def define(kind: str) -> type[MethodConfig]:
        class Cell(MethodConfig, kind=kind):
            pass

        return Cell

    first, again = define("cell"), define("cell")  # a cell of a notebook that is run again
    assert first is not again and MethodConfig.resolve("cell") is again
    # One kind is known already, of the other there is only a module that nothing has imported yet.
    (tmp_path / "saw.py").write_text(
        "from emoe.methods.base import MethodConfig\nclass Saw(MethodConfig, kind='saw'): ..."
    )
    monkeypatch.setattr(emoe.methods, "__path__", [*emoe.methods.__path__, str(tmp_path)])
    for kind, home in {"emoe": "emoe.methods.emoe.EMoEConfig", "saw": "emoe.methods.saw.Saw"}.items():
        (line,) = problems(define, kind)
        assert line.startswith(f"kind: '{kind}' is both {home} and {__name__}.test_two")
        assert line.endswith(".Cell; choose another name for one")
    sys.modules.pop("emoe.methods.saw")


def test_a_backbone_that_lacks_what_the_method_needs(families: None) -> None:
    @dataclass(frozen=True, kw_only=True)
    class PlainConfig(BackboneConfig, kind="plain"):
        supports: ClassVar[frozenset[str]] = frozenset({"cond"})

    assert override(get_recipe("toy-8modes-mdlm"), {"backbone": "plain"}).backbone == PlainConfig()
    for recipe, needed in {"emoe": "experts", "vadd": "encoder"}.items():
        (line,) = problems(override, get_recipe(f"toy-8modes-{recipe}"), {"backbone": "plain"})
        assert line.startswith(f"backbone: 'plain' has no '{needed}'") and f"'{recipe}'" in line and "cond" in line
    assert list(TransformerConfig().unsupported(Needs(experts=2, cond=3, marks=True, encoder=4))) == []


def test_settings_need_not_be_text() -> None:
    settings: dict[str, object] = {"train.steps": 3, "eval.nfe": [1, 2], "optim.betas": (0.5, 0.9)}
    settings |= {"method.compare": None, "train.cuda_graph": False, "backbone.router": {"cap": 3.0}}
    settings |= {"method.relax_tau": Constant(value=0.5), "method.relax_tau.value": 0.25}
    copied = override(get_recipe("toy-8modes-emoe-vimco"), settings)
    assert (copied.train.steps, copied.eval.nfe, copied.optim.betas) == (3, (1, 2), (0.5, 0.9))
    assert isinstance(copied.method, EMoEConfig) and copied.method.compare is None
    assert copied.method.relax_tau == Constant(value=0.25) and not copied.train.cuda_graph
    compare = CompareConfig(estimator="wake-sleep", draws=2)
    assert override(copied, {"method.compare": compare}).method.compare == compare  # type: ignore[attr-defined]
    for value, line in {1.5: "got 1.5", "many": "got 'many'", True: "got True", None: "got None"}.items():
        assert problems(override, copied, {"train.steps": value})[0].endswith(line)
    assert problems(override, copied, {"eval.nfe": 4})[0] == "eval.nfe: expected whole number,... >= 1, got 4"


COMPARE = {"estimator": "vimco", "draws": 4, "credit": "row", "in_turn": True, "sum_last": False}
SLOPE = {"kind": "exponential", "start": 1.0, "end": 0.25, "share": 1.0, "steps": None}
TEXTS: list[tuple[dict[str, str], str, Any]] = [
    ({"train.steps": "1_000"}, "train.steps", 1000),
    ({"optim.lr": "1e-2"}, "optim.lr", 0.01),
    ({"backbone.router.norm": "true"}, "backbone.router.norm", True),
    ({"train.deterministic": "Yes"}, "train.deterministic", True),
    ({"optim.clip": "none"}, "optim.clip", None),
    ({"eval.nfe": "1,2,4"}, "eval.nfe", [1, 2, 4]),
    ({"eval.nfe": "[1, 2]"}, "eval.nfe", [1, 2]),
    ({"optim.betas": "(0.5, 0.9)"}, "optim.betas", [0.5, 0.9]),
    ({"method.relax-tau": "0.5"}, "method.relax_tau", {"kind": "constant", "value": 0.5}),
    ({"method.relax-tau": json.dumps({"kind": "exponential", "start": 1, "end": 0.25})}, "method.relax_tau", SLOPE),
    ({"method.relax-tau.end": "0.25"}, "method.relax_tau", SLOPE),
    (
        {"method.relax-tau.floor": "0.5", "method.relax-tau": "decay", "method.relax-tau.rate": "1e-3"},
        "method.relax_tau",
        {"kind": "decay", "start": 1.0, "rate": 0.001, "floor": 0.5},
    ),
    ({"method.relax-tau": "1", "method.relax-tau.value": "2"}, "method.relax_tau", {"kind": "constant", "value": 2.0}),
    (
        {"method.compare.draws": "4", "method.compare.estimator": "vimco", "method.compare.in-turn": "yes"},
        "method.compare",
        COMPARE,
    ),
    ({"method.schedule": "loglinear"}, "method.schedule", {"kind": "loglinear", "eps": 0.001}),
    ({"eval.sampler": '{"nucleus": 0.5}'}, "eval.sampler", {"kind": "plain", "nucleus": 0.5}),
    ({"name": "none"}, "name", "none"),
]


@pytest.mark.parametrize(("settings", "path", "expected"), TEXTS)
def test_text_of_a_command_line(settings: dict[str, str], path: str, expected: Any) -> None:
    node: Any = to_dict(override(get_recipe("toy-8modes-emoe"), settings))
    for part in path.split("."):
        node = node[part]
    assert node == expected and type(node) is type(expected)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"train.stepz": "5"}, "train.stepz: no such field; did you mean 'train.steps'?"),
        ({"optim.batch": "5"}, "optim.batch: no such field; did you mean 'train.batch'?"),
        ({"method.zzz": "5"}, "method.zzz: no such field; allowed: method.balance, method.compare, "),
        ({"seed.x": "5"}, "seed.x: no such field; "),
        ({"method": "vadd", "method.lattent": "5"}, "method.lattent: no such field; did you mean 'method.latent'?"),
        ({"": "5"}, ": no such field; "),
        ({"train.steps": "many"}, "train.steps: expected whole number >= 1, got 'many'"),
        ({"train.steps": "1" * 9999}, "train.steps: expected whole number >= 1, got '111"),
        ({"train.cuda-graph": "maybe"}, "train.cuda_graph: expected true|false, got 'maybe'"),
        ({"eval.nfe": "1,x"}, "eval.nfe: expected whole number >= 1, got 'x'"),
        ({"method.relax-tau": "{"}, "method.relax_tau: not valid JSON ("),
        ({"method.relax-tau": "slope"}, "method.relax_tau.kind: 'slope' is not known; allowed: constant, decay, "),
        ({"method.schedule": "x", "method.schedule.y": "1"}, "method.schedule.y: kind: 'x' is not known"),
        ({"method.relax-tau": '{"kind":' * 100_000}, "method.relax_tau: not valid JSON ("),
    ],
)
def test_text_that_is_refused(settings: dict[str, str], line: str) -> None:
    lines = problems(override, get_recipe("toy-8modes-emoe"), settings)
    assert lines[0].startswith(line), lines


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**400, -(10**400), 0.0, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf,
    "", "none", "emoe", "linear", "x" * 500, "\0", "é\n", [], [1], [1, [2]], ["a", None], {}, {"kind": "linear"},
    {"kind": ["emoe"]}, {1: 2}, {"": {}}, (), (1, 2), b"bytes", {"kind": "base"}, {"kind": "../methods"},
]  # fmt: skip


def spots(tree: Any) -> list[tuple[dict[Any, Any], Any]]:
    """Every (dictionary, key) inside a tree."""
    pairs = []
    if isinstance(tree, dict):
        for key, value in tree.items():
            pairs += [(tree, key), *spots(value)]
    return pairs


def mutate(tree: dict[str, Any], draw: random.Random) -> None:
    inner, key = draw.choice(spots(tree))
    action = draw.randrange(6)
    if action == 0:
        del inner[key]
    elif action == 1:
        inner[draw.choice(["kind", "seed", "value", f"{key}s", str(key)[:-1], "", 5, None])] = inner[key]
    elif action == 2:
        other, name = draw.choice(spots(tree))
        inner[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(inner[key])
    else:
        inner[key] = copy.deepcopy(draw.choice(JUNK))


def load_or_refuse(build: Callable[..., Experiment], *arguments: Any) -> bool:
    """Whether it loads; what is refused has messages of one line, and what loads survives a round trip."""
    try:
        experiment = build(*arguments)
    except ConfigError as error:
        assert error.problems and all(line and "\n" not in line for line in error.problems)
        return False
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment), allow_nan=False))) == experiment
    return True


def test_mutated_dictionaries_load_or_are_refused() -> None:
    draw, loaded = random.Random(0), 0
    trees = [to_dict(get_recipe(name)) for name in RECIPES]
    for _ in range(500):
        tree = copy.deepcopy(draw.choice(trees))
        for _ in range(draw.randint(1, 4)):
            if spots(tree):
                mutate(tree, draw)
        loaded += load_or_refuse(from_dict, Experiment, tree)
    assert 10 < loaded < 400


def test_mutated_command_lines_load_or_are_refused() -> None:
    draw, loaded = random.Random(1), 0
    texts = ["", "0", "-1", "1", "2", "0.5", "1e400", "nan", "none", "true", "1,2", "{}", "{", '{"kind":1}', "[]", "é"]
    texts += ["emoe", "vadd", "mdlm", "toy", "rows", "transformer", "linear", "decay", "x" * 99, '{"a":{}}']
    experiments = [get_recipe(name) for name in RECIPES]
    for _ in range(200):
        experiment = draw.choice(experiments)
        known = {path.replace("_", draw.choice("_-")): as_text(value) for path, _, _, value in paths(experiment)}
        settings = {}
        for name in draw.sample(list(known), draw.randint(1, 3)):
            odd = [name] * 6 + [f"{name}.kind", f"{name}.x", name[:-1], name.upper()]
            settings[draw.choice(odd)] = draw.choice([draw.choice(texts), known[name]])
        loaded += load_or_refuse(override, experiment, settings)
    assert 10 < loaded < 150


def test_families_know_their_kinds() -> None:
    assert {"emoe", "mdlm", "vadd"} <= set(MethodConfig.known_kinds())
    assert not {"base", "layers"} & {*MethodConfig.known_kinds(), *BackboneConfig.known_kinds()}
    for family in (MethodConfig, BackboneConfig, DomainConfig, Ramp):
        for kind in family.known_kinds():
            assert issubclass(family.resolve(kind), family) and family.resolve(kind).kind == kind
    assert Family.members == {}


def test_a_sparse_dictionary_has_no_defaults_at_any_depth() -> None:
    experiment = customise(get_recipe("toy-8modes-mdlm"), {"train.log-every": "7"})
    sparse, full = to_dict(experiment, sparse=True), to_dict(experiment)
    assert sparse["method"]["kind"] == "mdlm" and "schedule" not in sparse["method"] and "schedule" in full["method"]
    assert sparse["train"]["log_every"] == 7 and from_dict(Experiment, sparse) == experiment
