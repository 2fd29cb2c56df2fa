"""Configuration: what loads, what is refused, and what a refusal says."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from emoe.backbones.base import BackboneConfig
from emoe.backbones.transformer import TransformerConfig
from emoe.commands import as_typed
from emoe.config import ConfigError, Family, allowed_range, field_hint, from_dict, override, paths, to_dict
from emoe.domains.base import DomainConfig
from emoe.engine.optim import OptimConfig
from emoe.engine.trainer import TrainConfig
from emoe.experiment import EvalConfig, Experiment, customise, differences
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant, Decay, Exponential, Linear, Ramp
from emoe.recipes import all_recipes, get_recipe
from emoe.types import Wants

RECIPES = sorted(all_recipes())


def problems(call: Any, *args: Any) -> list[str]:
    """What a call complains about."""
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert caught.value.problems and str(caught.value).splitlines() == caught.value.problems
    return caught.value.problems


def changed(base: str = "toy-8modes-emoe", /, **settings: Any) -> dict[str, Any]:
    """The dictionary of a recipe with dotted fields (a double underscore is a dot) replaced."""
    tree = to_dict(get_recipe(base))
    for name, value in settings.items():
        *parents, last = name.split("__")
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
def test_round_trip_through_json(name: str) -> None:
    experiment = get_recipe(name)
    tree = json.loads(json.dumps(to_dict(experiment), allow_nan=False))
    assert from_dict(Experiment, tree) == experiment
    assert override(experiment, {}) == experiment
    assert differences(experiment, from_dict(Experiment, tree)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_can_be_set_to_the_value_it_has(name: str) -> None:
    experiment = get_recipe(name)
    settings = {path: as_typed(value).strip("'") for path, _, _, value in paths(experiment)}
    assert len(settings) > 25
    # Naming a kind resets the fields of its group, and then all of them are given: nothing may change.
    assert override(experiment, settings) == experiment


def test_every_field_has_words_and_every_path_is_a_field() -> None:
    tree = to_dict(get_recipe("toy-8modes-emoe"))
    for path, _, field, value in paths(get_recipe("toy-8modes-emoe")):
        assert field.metadata["doc"], path
        found: Any = tree
        for part in path.split("."):
            found = found[part]
        assert value == (
            found["kind"] if isinstance(found, dict) else tuple(found) if isinstance(found, list) else found
        )


REFUSED = {
    "typo in a field": (changed(train__step=5), "train.step: unknown field of TrainConfig; did you mean 'steps'?"),
    "nothing close": (changed(train__zzz=5), "train.zzz: unknown field of TrainConfig; allowed: accumulate, batch, "),
    "field at the top": (changed(sed=5), "sed: unknown field of Experiment; did you mean 'seed'?"),
    "text for a number": (changed(optim__lr="fast"), "optim.lr: expected number > 0, got 'fast'"),
    "fraction of a step": (changed(train__steps=1.5), "train.steps: expected whole number >= 1, got 1.5"),
    "truth for a number": (changed(train__steps=True), "train.steps: expected whole number >= 1, got True"),
    "truth for a fraction": (changed(optim__lr=True), "optim.lr: expected number > 0, got True"),
    "number for truth": (changed(method__mask_aware=1), "method.mask_aware: expected true|false, got 1"),
    "number for text": (changed(name=5), "name: expected text, got 5"),
    "list for a number": (changed(train__batch=[1]), "train.batch: expected whole number >= 1, got [1]"),
    "number for a list": (changed(eval__nfe=4), "eval.nfe: expected whole number,... >= 1, got 4"),
    "text in a list": (changed(eval__nfe=[1, "2"]), "eval.nfe: expected whole number >= 1, got '2'"),
    "none": (changed(train__steps=None), "train.steps: expected whole number >= 1, got None"),
    "number for a group": (changed(train=3), "train: expected the fields of TrainConfig, got 3"),
    "list for a family": (changed(method=[]), "method: expected the fields of MethodConfig, got []"),
    "negative steps": (changed(train__steps=-1), "train.steps: must be >= 1, got -1"),
    "no step": (changed(train__steps=0), "train.steps: must be >= 1, got 0"),
    "NFE 0": (changed(eval__nfe=[1, 0]), "eval.nfe: must be >= 1, got 0"),
    "no NFE": (changed(eval__nfe=[]), "eval.nfe: must hold at least one number"),
    "learning rate 0": (changed(optim__lr=0), "optim.lr: must be > 0, got 0.0"),
    "learning rate nan": (changed(optim__lr=math.nan), "optim.lr: must be > 0, got nan"),
    "learning rate inf": (changed(optim__lr=math.inf), "optim.lr: must be > 0, got inf"),
    "route tau nan": (changed(method__route_tau=math.nan), "method.route_tau: must be >= 0, got nan"),
    "a number no float holds": (changed(optim__lr=10**400), "optim.lr: expected number > 0, got 1000"),
    "beta of 1": (changed(optim__betas=[0.9, 1.0]), "optim.betas: must be two numbers in [0, 1), got (0.9, 1.0)"),
    "one beta": (changed(optim__betas=[0.9]), "optim.betas: must be two numbers in [0, 1), got (0.9,)"),
    "EMA of 1": (changed(train__ema=1), "train.ema: must be >= 0 and <= 0.999999, got 1.0"),
    "one checkpoint": (changed(train__keep=1), "train.keep: must be >= 2, got 1"),
    "top-k over E": (changed(method__top_k=9), "method.top_k: must be in 1..experts = 8, got 9"),
    "no expert": (changed(method__experts=0), "method.experts: must be >= 1, got 0"),
    "heads": (changed(backbone__heads=3), "backbone.heads: must divide width = 128, got 3"),
    "odd time features": (changed(backbone__time_size=7), "backbone.time_size: must be even, got 7"),
    "choice": (changed(domain__density="8modes"), "domain.density: got '8modes'; did you mean '8-modes'?"),
    "choice of another type": (changed(train__precision=[]), "train.precision: got []; allowed: bf16, fp32, tf32"),
    "relax_tau 0": (changed(method__relax_tau=0), "method.relax_tau: must be > 0, got 0.0"),
    "relax_tau nan": (changed(method__relax_tau=math.nan), "method.relax_tau.value: must be a finite number, got nan"),
    "relax_tau in text": (
        changed(method__relax_tau="0.5"),
        "method.relax_tau: expected the fields of Ramp, got '0.5'",
    ),
    "ramp down to 0": (
        changed(method__relax_tau={"kind": "linear", "start": 1, "end": 0}),
        "method.relax_tau: must be > 0, got 0.0",
    ),
    "ramp without an end": (
        changed(method__relax_tau={"kind": "linear", "start": 1}),
        "method.relax_tau.end: missing; value at the end of the ramp",
    ),
    "field of another ramp": (
        changed(method__relax_tau={"kind": "constant", "value": 1, "share": 1}),
        "method.relax_tau.share: unknown field of Constant; ",
    ),
    "kind with a typo": (changed(method={"kind": "emo"}), "method.kind: 'emo' is not known; did you mean 'emoe'?"),
    "kind left out": (changed(method={}), "method.kind: missing; allowed: "),
    "kind that is no text": (changed(method={"kind": 5}), "method.kind: expected text, got 5; allowed: "),
    "kind that is a helper module": (changed(backbone={"kind": "layers"}), "backbone.kind: 'layers' is not known; "),
    "required field left out": (changed(domain={"kind": "toy"}), "domain.density: missing; which density"),
    "key without names": (
        changed("rows-emoe", domain__path="x.npy", domain__key="a"),
        "domain.key: only .npz files hold named arrays",
    ),
    "not a dictionary": (7, "expected the fields of Experiment, got 7"),
}


@pytest.mark.parametrize(("tree", "line"), REFUSED.values(), ids=REFUSED)
def test_refused(tree: Any, line: str) -> None:
    found = problems(from_dict, Experiment, tree)
    assert len(found) == 1 and found[0].startswith(line)


def test_all_problems_are_reported_at_once() -> None:
    tree = changed(train__steps="many", optim__lr=-1, method__topk=2)
    found = problems(from_dict, Experiment, tree)
    assert [line.split(":")[0] for line in found] == ["method.topk", "optim.lr", "train.steps"]


def test_a_long_value_does_not_flood_the_message() -> None:
    (line,) = problems(from_dict, Experiment, changed(train__steps="x" * 10_000))
    assert len(line) < 200 and "\n" not in line


def test_a_config_checks_its_ranges_when_it_is_made_in_python() -> None:
    assert problems(lambda: TrainConfig(steps=0, batch=0)) == [
        "steps: must be >= 1, got 0",
        "batch: must be >= 1, got 0",
    ]
    assert problems(lambda: EMoEConfig(relax_tau=Constant(value=0.0))) == ["relax_tau: must be > 0, got 0.0"]
    assert problems(lambda: EMoEConfig(experts=1))[0].startswith("top_k: ")
    assert problems(lambda: EvalConfig(nfe=())) == ["nfe: must hold at least one number, such as 1,2,4"]
    assert problems(lambda: TrainConfig(steps=-(10**400)))[0].startswith("steps: must be >= 1, got -1000")
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 5  # type: ignore[misc]


def test_ranges_are_written_as_people_write_them() -> None:
    fields = {field.name: field.metadata for field in dataclasses.fields(TrainConfig)}
    assert allowed_range(fields["steps"]) == ">= 1"
    assert allowed_range(fields["ema"]) == ">= 0 and <= 0.999999"
    assert allowed_range(fields["precision"]) == ""


@pytest.mark.parametrize(
    ("value", "ramp"),
    [
        (0.5, Constant(value=0.5)),
        (2, Constant(value=2.0)),
        ({"kind": "linear", "start": 1, "end": 0.5, "steps": 10}, Linear(start=1.0, end=0.5, steps=10)),
        ({"kind": "exponential", "start": 1, "end": 0.5}, Exponential(start=1.0, end=0.5)),
        ({"kind": "decay", "rate": 1e-3, "floor": 0.1}, Decay(rate=1e-3, floor=0.1)),
    ],
)
def test_ramps(value: Any, ramp: Ramp) -> None:
    loaded = from_dict(Experiment, changed(method__relax_tau=value))
    assert isinstance(loaded.method, EMoEConfig) and loaded.method.relax_tau == ramp
    assert to_dict(loaded)["method"]["relax_tau"]["kind"] == ramp.kind


def test_switching_a_family_resets_its_fields() -> None:
    experiment = override(get_recipe("toy-8modes-emoe"), {"method": "vadd"})
    assert experiment.method == VADDConfig()  # t_low = 1/64 was the recipe's choice for E-MoE
    assert override(experiment, {"method": "vadd", "method.latent": "3"}).method == VADDConfig(latent=3)
    assert override(experiment, {"method.latent": "3", "method.kind": "vadd"}).method == VADDConfig(latent=3)
    assert problems(override, experiment, {"method.top-k": "2"})[0].startswith("method.top-k: no such field; ")
    tree = changed(method={**to_dict(get_recipe("toy-8modes-emoe"))["method"], "kind": "vadd"})
    found = [line.split(":")[0] for line in problems(from_dict, Experiment, tree)]
    assert {"method.experts", "method.top_k", "method.relax_tau"} <= set(found)


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
    mine = override(base, {"method": "my-method", "method.strength": "2", "backbone": "my-backbone"})
    assert (mine.method, mine.backbone) == (MyMethodConfig(strength=2.0), MyBackboneConfig())
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(mine)))) == mine
    assert override(base, {"method.relax-tau": "steps"}).method == dataclasses.replace(
        base.method,
        relax_tau=MyRamp(),  # type: ignore[call-arg]
    )
    assert "my-method" in problems(override, base, {"method": "zzz"})[0]


def test_a_backbone_that_lacks_what_the_method_needs(families: None) -> None:
    @dataclass(frozen=True, kw_only=True)
    class PlainConfig(BackboneConfig, kind="plain"):
        supports: ClassVar[frozenset[str]] = frozenset({"cond"})

    assert override(get_recipe("toy-8modes-mdlm"), {"backbone": "plain"}).backbone == PlainConfig()
    (line,) = problems(override, get_recipe("toy-8modes-emoe"), {"backbone": "plain"})
    assert line.startswith("backbone: 'plain' has no 'experts'") and "'emoe'" in line and "cond" in line
    (line,) = problems(override, get_recipe("toy-8modes-vadd"), {"backbone": "plain"})
    assert "'plain' has no 'encoder'" in line and "'vadd'" in line
    settings = {"backbone": "plain", "method.mask-aware": "true"}
    found = problems(override, get_recipe("toy-8modes-emoe"), settings)
    assert [line.split("'")[3] for line in found] == ["experts", "marks"]
    assert list(TransformerConfig().refusals(Wants(experts=2, cond=3, marks=True, encoder=4))) == []


TEXTS: dict[str, tuple[dict[str, str], tuple[str, Any]]] = {
    "whole number": ({"train.steps": "50"}, ("train.steps", 50)),
    "whole number with underscores": ({"train.steps": "1_000"}, ("train.steps", 1000)),
    "fraction": ({"optim.lr": "1e-2"}, ("optim.lr", 0.01)),
    "true": ({"method.mask-aware": "true"}, ("method.mask_aware", True)),
    "yes": ({"method.mask-aware": "Yes"}, ("method.mask_aware", True)),
    "off": ({"train.cuda_graph": "off"}, ("train.cuda_graph", False)),
    "none": ({"optim.clip": "none"}, ("optim.clip", None)),
    "null": ({"optim.clip": "null"}, ("optim.clip", None)),
    "list": ({"eval.nfe": "1,2,4"}, ("eval.nfe", [1, 2, 4])),
    "list with brackets": ({"eval.nfe": "[1, 2]"}, ("eval.nfe", [1, 2])),
    "list of one": ({"eval.nfe": "8"}, ("eval.nfe", [8])),
    "fractions": ({"optim.betas": "(0.5, 0.9)"}, ("optim.betas", [0.5, 0.9])),
    "choice": ({"domain.density": "swiss-roll"}, ("domain.density", "swiss-roll")),
    "number as a ramp": ({"method.relax-tau": "0.5"}, ("method.relax_tau", {"kind": "constant", "value": 0.5})),
    "JSON as a ramp": (
        {"method.relax-tau": '{"kind": "linear", "start": 1, "end": 0.5}'},
        ("method.relax_tau", {"kind": "linear", "start": 1.0, "end": 0.5, "share": 1.0, "steps": None}),
    ),
    "part of a ramp": (
        {"method.relax-tau.end": "0.25"},
        ("method.relax_tau", {"kind": "exponential", "start": 1.0, "end": 0.25, "share": 1.0, "steps": None}),
    ),
    "kind and parts of a ramp": (
        {"method.relax-tau.floor": "0.5", "method.relax-tau": "decay", "method.relax-tau.rate": "1e-3"},
        ("method.relax_tau", {"kind": "decay", "start": 1.0, "rate": 0.001, "floor": 0.5}),
    ),
    "number and then its value": (
        {"method.relax-tau": "1", "method.relax-tau.value": "2"},
        ("method.relax_tau", {"kind": "constant", "value": 2.0}),
    ),
    "a family without fields": ({"method.schedule": "cosine"}, ("method.schedule", {"kind": "cosine"})),
    "a group as JSON": (
        {"eval": '{"samples": 10}'},
        (
            "eval",
            {
                "nfe": [1, 2, 4, 8, 16, 32],
                "samples": 10,
                "batch": 5000,
                "sampler": {"kind": "plain", "nucleus": 1.0},
            },
        ),
    ),
    "text": ({"name": "none"}, ("name", "none")),
}


@pytest.mark.parametrize(("settings", "expected"), TEXTS.values(), ids=TEXTS)
def test_text_of_a_command_line(settings: dict[str, str], expected: tuple[str, Any]) -> None:
    found: Any = to_dict(override(get_recipe("toy-8modes-emoe"), settings))
    for part in expected[0].split("."):
        found = found[part]
    assert found == expected[1] and type(found) is type(expected[1])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"train.stepz": "5"}, "train.stepz: no such field; did you mean 'train.steps'?"),
        ({"trainn.steps": "5"}, "trainn.steps: no such field; did you mean 'train.steps'?"),
        ({"optim.batch": "5"}, "optim.batch: no such field; did you mean 'train.batch'?"),
        ({"method.zzz": "5"}, "method.zzz: no such field; allowed: method.balance, method.balance-form, "),
        ({"zzz.yyy": "5"}, "zzz.yyy: no such field; allowed: backbone, domain, eval, "),
        ({"seed.x": "5"}, "seed.x: no such field; "),
        ({"method": "vadd", "method.lattent": "5"}, "method.lattent: no such field; did you mean 'method.latent'?"),
        ({"": "5"}, ": no such field; "),
        ({"..": "5"}, "..: no such field; "),
        ({"train.steps": "many"}, "train.steps: expected whole number >= 1, got 'many'"),
        ({"train.steps": "1__0"}, "train.steps: expected whole number >= 1, got '1__0'"),
        ({"train.steps": "1" * 9999}, "train.steps: expected whole number >= 1, got '111"),
        ({"train.steps": "-4"}, "train.steps: must be >= 1, got -4"),
        ({"train.steps": ""}, "train.steps: expected whole number >= 1, got ''"),
        ({"optim.lr": "nan"}, "optim.lr: must be > 0, got nan"),
        ({"optim.lr": "1e999"}, "optim.lr: must be > 0, got inf"),
        ({"optim.clip": "0"}, "optim.clip: must be > 0, got 0.0"),
        ({"method.mask-aware": "maybe"}, "method.mask_aware: expected true|false, got 'maybe'"),
        ({"eval.nfe": "1,x"}, "eval.nfe: expected whole number >= 1, got 'x'"),
        ({"eval.nfe": ""}, "eval.nfe: must hold at least one number"),
        ({"method.relax-tau": "{"}, "method.relax_tau: not valid JSON ("),
        ({"method.relax-tau": "nan"}, "method.relax_tau.value: must be a finite number, got nan"),
        ({"method.relax-tau": "slope"}, "method.relax_tau.kind: 'slope' is not known; allowed: constant, decay, "),
        (
            {"method.relax-tau": "slope", "method.relax-tau.end": "1"},
            "method.relax_tau.end: kind: 'slope' is not known",
        ),
        ({"method": "emoe", "method.kind": ""}, "method.kind: missing; allowed: "),
    ],
)
def test_text_that_is_refused(settings: dict[str, str], line: str) -> None:
    found = problems(override, get_recipe("toy-8modes-emoe"), settings)
    assert found[0].startswith(line), found


def test_deeply_nested_json_is_refused() -> None:
    text = '{"kind":' * 100_000
    assert "not valid JSON" in problems(override, get_recipe("toy-8modes-emoe"), {"method.relax-tau": text})[0]


def test_suggestions() -> None:
    fields = ["train.steps", "method.ramp.steps", "train.batch", "seed"]
    assert field_hint("trainn.steps", fields) == "; did you mean 'train.steps'?"
    assert field_hint("steps", fields) == "; did you mean 'train.steps'?"
    assert field_hint("sead", fields) == "; did you mean 'seed'?"
    assert field_hint("train.xyzzy", fields) == "; allowed: train.batch, train.steps"
    assert field_hint("xyzzy", fields) == "; allowed: method, seed, train"


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**400, -(10**400), 0.0, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf,
    "", "none", "emoe", "linear", "x" * 500, "\0", "é\n", [], [1], [1, [2]], ["a", None], {}, {"kind": "linear"},
    {"kind": ["emoe"]}, {1: 2}, {"": {}}, (), (1, 2), b"bytes", {"kind": "base"}, {"kind": "../methods"},
]  # fmt: skip


def spots(tree: Any) -> list[tuple[dict[Any, Any], Any]]:
    """Every (dictionary, key) inside a tree."""
    found = []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += [(tree, key), *spots(value)]
    return found


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


def test_500_mutated_dictionaries_load_or_are_refused() -> None:
    draw, loaded = random.Random(0), 0
    trees = [to_dict(get_recipe(name)) for name in RECIPES]
    for _ in range(500):
        tree = copy.deepcopy(draw.choice(trees))
        for _ in range(draw.randint(1, 4)):
            mutate(tree, draw)
            if not spots(tree):
                break
        try:
            experiment = from_dict(Experiment, tree)
        except ConfigError as error:
            assert error.problems and all(line and "\n" not in line for line in error.problems)
            continue
        loaded += 1
        assert from_dict(Experiment, to_dict(experiment)) == experiment
        json.dumps(to_dict(experiment), allow_nan=False)
    assert 10 < loaded < 400


def test_200_mutated_command_lines_load_or_are_refused() -> None:
    draw, loaded = random.Random(1), 0
    texts = ["", "0", "-1", "1", "2", "0.5", "1e400", "nan", "none", "true", "1,2", "{}", "{", '{"kind":1}', "[]", "é"]
    texts += ["emoe", "vadd", "mdlm", "toy", "rows", "transformer", "linear", "decay", "cosine", "x" * 99, '{"a":{}}']
    experiments = [get_recipe(name) for name in RECIPES]
    for _ in range(200):
        experiment = draw.choice(experiments)
        known = {path.replace("_", draw.choice("_-")): as_typed(value) for path, _, _, value in paths(experiment)}
        settings = {}
        for _ in range(draw.randint(1, 3)):
            name = draw.choice(list(known))
            typed = draw.choice([draw.choice(texts), known[name]])
            settings[draw.choice([name] * 6 + [f"{name}.kind", f"{name}.x", name[:-1], name.upper()])] = typed
        try:
            changed_experiment = override(experiment, settings)
        except ConfigError as error:
            assert error.problems and all(line and "\n" not in line for line in error.problems)
            continue
        loaded += 1
        assert from_dict(Experiment, to_dict(changed_experiment)) == changed_experiment
    assert 10 < loaded < 150


def test_an_optimiser_config_alone() -> None:
    assert from_dict(OptimConfig, {}) == OptimConfig()
    assert from_dict(OptimConfig, {"clip": None}, "optim").clip is None
    assert problems(from_dict, OptimConfig, {"lr": "x"}, "optim") == ["optim.lr: expected number > 0, got 'x'"]


def test_families_know_their_kinds() -> None:
    assert {"emoe", "mdlm", "vadd"} <= set(MethodConfig.known_kinds())
    assert not {"base", "layers"} & {*MethodConfig.known_kinds(), *BackboneConfig.known_kinds()}
    for family in (MethodConfig, BackboneConfig, DomainConfig, Ramp):
        for kind in family.known_kinds():
            assert issubclass(family.resolve(kind), family) and family.resolve(kind).kind == kind
    assert Family.members == {}


def test_a_sparse_dictionary_leaves_out_what_is_as_declared_at_any_depth() -> None:
    experiment = get_recipe("toy-8modes-mdlm")
    sparse, full = to_dict(experiment, sparse=True), to_dict(experiment)
    assert sparse["method"]["kind"] == "mdlm" and "schedule" not in sparse["method"] and "schedule" in full["method"]
    changed = customise(experiment, {"train.log-every": "7", "method.schedule": "cosine"})
    other = to_dict(changed, sparse=True)
    assert other["train"]["log_every"] == 7 and other["method"]["schedule"]["kind"] == "cosine"
    assert from_dict(Experiment, sparse) == experiment and from_dict(Experiment, other) == changed
