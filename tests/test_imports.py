"""The dependency rule, names that the engine must not use, and work without optional packages."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import emoe
from emoe.backbones.base import BackboneConfig
from emoe.domains.base import DomainConfig
from emoe.methods.base import MethodConfig

PACKAGE = Path(emoe.__file__).parent

BASE = ["config", "types", "rng", "ramps", "files", "console", "kernels"]
NETWORKS = [*BASE, "diffusion.*", "routing.*", "backbones.*"]
RUNS = [*NETWORKS, "methods.*", "engine.*", "domains*", "experiment", "overrides", "recipes", "runs.*"]
MEASURES = [*RUNS, "exact.*", "evaluation.*", "figures*", "reporting*"]

# Module (the first pattern that fits) -> modules of the package that it may import; what fits the same pattern too,
# if it ends in a star.
LAYERS: dict[str, list[str]] = {
    "config": [],
    "files": [],
    "console": [],
    "types": [],
    "rng": [],
    "kernels*": [],
    "ramps": ["config"],
    "overrides": ["config"],
    "diffusion*": BASE,
    "routing*": [*BASE, "diffusion.*"],
    "backbones*": [*BASE, "diffusion.*", "routing.*"],
    "methods*": NETWORKS,
    "engine*": BASE,
    "figures*": ["types", "files"],
    "domains*": ["config", "types", "rng", "files", "figures.base", "figures.panels"],
    "reporting*": ["config", "files", "console", "figures*", "engine.metricslog"],
    "experiment": [*BASE, "overrides", "engine.*", "backbones.base", "methods.base", "domains.base"],
    "recipes*": [*NETWORKS, "methods.*", "engine.*", "domains*", "experiment"],
    "runs.sampling": [*BASE, "diffusion.*", "engine.arithmetic", "methods.base"],
    "exact*": [*NETWORKS, "methods.base", "runs.sampling"],
    "evaluation*": [*RUNS, "exact.*", "reporting.results"],
    "runs*": [*RUNS, "evaluation.measure", "reporting.*", "figures.base"],
    "studies*": MEASURES,
    "commands*": [*MEASURES, "studies*"],
    "cli": ["config"],
    "__init__": ["rng", "runs.*"],
    "__main__": ["cli"],
}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imports(path: Path) -> set[str]:
    """All modules a file imports, wherever it does so; `from a import b` counts as a.b if that is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix("emoe.")
                is_module = inner in MODULES or f"{inner}.__init__" in MODULES
                found.add(f"{module}.{alias.name}" if module.startswith("emoe") and is_module else module)
    return found


def own(path: Path) -> set[str]:
    """Modules of this package that a file imports, without the package's name."""
    return {name.removeprefix("emoe.") for name in imports(path) if name.startswith("emoe.")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_dependency_rule(module: str) -> None:
    pattern = next((pattern for pattern in LAYERS if fnmatch(module, pattern)), "")
    assert pattern, f"{module} has no place in the table of layers"
    allowed = LAYERS[pattern] + [pattern] * pattern.endswith("*")
    wrong = [name for name in own(MODULES[module]) if not any(fnmatch(name, one) for one in allowed)]
    assert wrong == [], f"{module} may import {allowed}"


def test_every_layer_of_the_table_exists() -> None:
    assert [pattern for pattern in LAYERS if not any(fnmatch(module, pattern) for module in MODULES)] == []


def test_methods_backbones_and_domains_do_not_know_each_other() -> None:
    shared = {"methods.base", "methods.masked", "backbones.base", "backbones.layers", "backbones.attention"}
    for family in ("methods", "backbones"):
        for name in [name for name in MODULES if name.startswith(f"{family}.")]:
            others = {one for one in own(MODULES[name]) if one.startswith(f"{family}.")} - shared
            assert others == set(), f"{name} imports {others}"


def test_extras_that_messages_name_exist() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        name for path in MODULES.values() for name in re.findall(r"emoe\[(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert named and named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=lambda path: path.name)
def test_the_engine_names_no_method_backbone_or_domain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    kinds = {*MethodConfig.known_kinds(), *BackboneConfig.known_kinds(), *DomainConfig.known_kinds()}
    # The name of the package and the words for lines of data, 0 to 9 and strings are allowed, but not for kinds.
    words = kinds - {"emoe", "rows", "digits", "text"}
    words |= {"expert", "experts", "router", "latent", "diffusion", "mask", "e-moe"}
    assert re.findall(rf"(?i)\b({'|'.join(map(re.escape, sorted(words)))})\b", text) == []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            assert token.string.strip("rbf").strip("\"'") not in kinds
        elif token.type == tokenize.NAME and token.string.lower() == "emoe":
            assert token.line.lstrip().startswith(("from emoe", "import emoe"))


def python(script: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)


def test_results_and_tables_work_without_torch(tmp_path: Path) -> None:
    names = ["config", "ramps", "cli", *(name for name in MODULES if name.startswith(("commands.", "reporting.")))]
    script = f"""
import importlib, sys
sys.modules.update(dict.fromkeys(["torch", "numpy", "matplotlib", "rich", "sklearn", "jaxtyping"]))
for name in {names}:
    importlib.import_module("emoe." + name)
from emoe.reporting.docs import main
from emoe.reporting.html import write_page
from emoe.reporting.results import Results, RunInfo, Row
from emoe.reporting.table import print_metrics
row = dict(task="toy", data="8-modes", method="mdlm", recipe="r", seed=0, metric="validity", value=1.5)
info = RunInfo(command="c", commit="d", device="e", torch="", python="3", date="2025-01-01T00:00:00Z", wall_s=1)
results = Results().add(info, [Row(**row, nfe=nfe) for nfe in (1, 2)])
print_metrics(results, "toy", ["validity"])
write_page({str(tmp_path / "page.html")!r}, "title", results)
assert main(["--root", {str(PACKAGE.parents[1])!r}, "--check"]) == 0
"""
    done = python(script)
    assert done.returncode == 0 and "1.5" in done.stdout, done.stderr
    assert "matplotlib is not installed" in (tmp_path / "page.html").read_text(encoding="utf-8")


OPTIONAL = (
    "tyro cyclopts rich matplotlib sklearn scipy transformers pandas yaml pydantic tensorboard beartype wandb datasets "
    "psutil hypothesis pytest omegaconf hydra lightning einops tqdm tokenizers accelerate triton mauve faiss"
)

WITHOUT = """
import sys
optional = {optional!r}.split()
sys.modules.update(dict.fromkeys(optional))
import numpy as np
import torch
from emoe.cli import main
from emoe.runs.train import load_run, train

torch.set_num_threads(1)
np.save("rows.npy", np.arange(60).reshape(20, 3) % 6)
sizes = {{"width": 8, "hidden": 16, "heads": 2, "time-size": 8}}
small = {{"backbone." + name: str(size) for name, size in sizes.items()}}
small |= {{"train.steps": "3", "train.batch": "4", "eval.samples": "20", "eval.nfe": "1,2"}}
domains = {{"toy-8modes-": {{"domain.points": "50"}}, "rows-": {{"domain.path": "rows.npy"}}}}
for method in "mdlm", "vadd", "emoe":
    for domain, more in domains.items():
        recipe = domain + method
        run = train(recipe, "runs/" + recipe, settings=small | more, device="cpu")
        assert run.step == 3 and run.sample(5, 2).shape == (5, run.domain.space.length)
        assert run.evaluate()
        assert load_run("runs/" + recipe, device="cpu").step == 3
        assert main(["eval", "runs/" + recipe, "--device", "cpu"]) == 0
assert main(["sample", "runs/rows-emoe", "--device", "cpu"]) == 0
assert main("train rows-emoe --run x --tensorboard --domain.path rows.npy --train.steps 1".split()) == 2
assert all(sys.modules[name] is None for name in optional)
print("through")
"""


def test_training_sampling_and_evaluation_without_optional_packages(tmp_path: Path) -> None:
    script = f"import os; os.chdir({str(tmp_path)!r})\n" + WITHOUT.format(optional=OPTIONAL)
    done = python(script)
    assert done.returncode == 0 and done.stdout.endswith("through\n"), done.stderr
    assert "tensorboard: the package is missing; pip install emoe[track]" in done.stderr
    assert "step 3/3 (100.0%)" in done.stderr  # plain lines in place of a bar
