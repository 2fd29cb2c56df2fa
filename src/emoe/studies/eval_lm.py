"""The prepared sets of the text study, and its evaluation LM.

The evaluation LM is the AR recipe, trained with early stopping on text that no model saw. Beside its run folder is
another one that ends in `-best`: the checkpoint with the lowest loss on the validation rows of its own text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emoe.domains.base import DataError, Domain
from emoe.domains.text.data import Text, TextConfig, read_manifest
from emoe.engine import checkpoint
from emoe.engine.arithmetic import arithmetic
from emoe.engine.callbacks import EarlyStopping, FitInfo
from emoe.engine.metricslog import read_metrics
from emoe.evaluation.eval_lm import RunLM
from emoe.evaluation.measure import estimate_nll
from emoe.experiment import Experiment, customise
from emoe.recipes import get_recipe
from emoe.runs.train import load_run
from emoe.studies.stages import Trained, steps_done
from emoe.types import Likelihood

CHECKS = 8  # validations during training, each of a checkpoint
PATIENCE = 3  # validations without a lower loss, after which training ends
METRIC = "valid_nll"  # in the log: nats per token


def describe_text(text: Text) -> dict[str, Any]:
    """The held-out rows of a set and its tokens, by checksum."""
    manifest, space, split = text.manifest, text.space, text.held_out
    rows = {"data": text.name, "split": split, "split_sha256": manifest["splits"][split]["sha256"]}
    tokens = {"tokenizer": manifest["tokenizer"]["sha256"], "packing": manifest.get("packing")}
    return {**rows, **tokens, "length": space.length, "size": space.size, "mask": space.mask_id}


@dataclass
class Sets:
    """Text of the models, of the evaluation LM and of --zero-shot; a folder replaces the path of a config."""

    config: Any
    lm_config: Any
    folder: Path | None
    lm_folder: Path | None
    zero_shot: Path | None
    _built: dict[TextConfig, Text] = field(default_factory=dict)

    def path(self, config: Any) -> Path:
        """The folder of a set."""
        return (self.folder if config.path == self.config.path else self.lm_folder) or Path(config.path)

    def open(self, config: Any) -> Text:
        """A set, named after the path of its config even if it is in another folder."""
        if config not in self._built:
            self._built[config] = Text(dataclasses.replace(config, path=str(self.path(config))))
            self._built[config].name = Path(config.path).name
        return self._built[config]

    @functools.cached_property
    def zero_shot_text(self) -> Text | None:
        """The text of --zero-shot, which must have the tokenizer of the models."""
        if self.zero_shot is None:
            return None
        text, own = TextConfig(path=str(self.zero_shot)).build(0), self.open(self.config)
        if describe_text(text)["tokenizer"] != describe_text(own)["tokenizer"] or text.space != own.space:
            problem = f"{self.zero_shot} has another tokenizer or length than {own.name}"
            raise DataError(f"zero-shot: {problem}; prepare it with the same")
        return text

    def matching(self, manifest: Mapping[str, Any]) -> Text:
        """A set with the tokens and held-out rows of a pool: that of the models, or of the evaluation LM."""
        for config in (self.config, self.lm_config):
            try:
                splits = read_manifest(self.path(config))["splits"]
            except DataError:
                continue
            for split in ("test", "valid"):
                if splits.get(split, {}).get("sha256") == manifest["split_sha256"]:
                    text = self.open(dataclasses.replace(config, held_out=split))
                    if all(describe_text(text)[name] == manifest[name] for name in ("tokenizer", "length")):
                        text.name = manifest["data"]
                        return text
        raise DataError(
            f"score: samples of {manifest['recipe']} are compared with the {manifest['split']} rows of "
            f"{manifest['data']}, which no set here holds; give --set FOLDER, or an --eval-lm-set that was prepared "
            "with them as --test"
        )

    def check(self) -> None:
        """Raise an error that names the option if the set of the models is missing."""
        self._manifest(self.config, "set", "give --set FOLDER, which emoe data prepare wrote")

    def check_eval_lm(self) -> None:
        """Check the set of the evaluation LM: its tokenizer, validation rows, and no training file of the models."""
        remedy = "give --eval-lm-set FOLDER, text that no model saw, prepared with the same tokenizer"
        own = self._manifest(self.lm_config, "eval-lm-set", f"{remedy}, or one part alone: --only train")
        try:
            other = read_manifest(self.path(self.config))
        except DataError:
            other = own | {"inputs": []}  # the evaluation LM may be trained on a machine without the models' text
        known = {item["sha256"] for item in other["inputs"]}
        both = [item["path"] for item in own["inputs"] if "train" in item["starts"] and item["sha256"] in known]
        problem = f"trains on {both[0]}, which is in --set too; leave that file out of it" if both else ""
        if (own["tokenizer"]["sha256"], own["length"]) != (other["tokenizer"]["sha256"], other["length"]):
            problem = "has another tokenizer or length than --set; prepare it with the same"
        if "valid" not in own["splits"]:
            problem = "has no validation rows, which decide when to stop; prepare it with --split"
        if problem:
            raise DataError(f"eval-lm-set: {self.path(self.lm_config)} {problem}")

    def _manifest(self, config: Any, option: str, remedy: str) -> dict[str, Any]:
        try:
            return read_manifest(self.path(config))
        except DataError as error:
            raise DataError(f"{option}: {str(error).partition(';')[0]}; {remedy}") from None


def eval_lm_experiment(size: str, settings: Mapping[str, str], steps: int | None) -> Experiment:
    """The AR recipe of a size on text of its own, its validation rows held out; a checkpoint for every validation."""
    own = {name: text for name, text in settings.items() if not name.startswith("method.")}
    recipe = customise(get_recipe(f"{size}-ar"), own | ({} if steps is None else {"train.steps": str(steps)}))
    config: Any = recipe.domain
    return dataclasses.replace(
        recipe,
        name=recipe.name.replace(f"{size}-ar", f"{size}-judge", 1),
        domain=dataclasses.replace(config, path=f"{config.path}-judge", held_out="valid"),
        train=dataclasses.replace(recipe.train, save_every=math.ceil(recipe.train.steps / CHECKS)),
    )


class EvalLMRun(Trained):
    """The run of the evaluation LM."""

    @property
    def best_path(self) -> Path:
        """The run folder of the best step."""
        return self.path.with_name(f"{self.path.name}-best")

    @property
    def steps_left(self) -> int:
        """Steps after the last validation; 0 if the loss no longer falls; all of them if the best step is not saved."""
        best, steps, total = self.best(), list(self.validations()), self.experiment.train.steps
        if best is None or steps_done(self.best_path) != best[0]:
            return total
        return 0 if len(steps) - 1 - steps.index(best[0]) >= PATIENCE else total - steps[-1]

    def validations(self) -> dict[int, float]:
        """Loss of the validation rows by step, in nats per token."""
        log = self.path / "metrics.jsonl"
        records = read_metrics(log) if log.exists() else []
        return {record["step"]: record[METRIC] for record in records if METRIC in record}

    def best(self) -> tuple[int, float] | None:
        """The step with the lowest loss, and that loss."""
        return min(self.validations().items(), key=lambda item: item[1], default=None)

    @property
    def is_ready(self) -> bool:
        """Whether it can score: the best step is saved, and training has ended or ran on another machine."""
        return steps_done(self.best_path) > 0 and (not self.steps_left or not self.path.exists())

    def scorer(self, text: Text) -> RunLM:
        """The evaluation LM of the best step; `text` stands for its own set where that is not on this machine."""
        domain: Domain = text
        with contextlib.suppress(DataError):
            domain = self.domain
        return RunLM(load_run(self.best_path, device=str(self.study.device), domain=domain))


class KeepBest(EarlyStopping):
    """Validates checkpoints, saves the best one, and stops when they no longer improve."""

    def __init__(self, run: EvalLMRun):
        super().__init__(METRIC, PATIENCE)
        self.run = run

    def on_start(self, info: FitInfo) -> None:
        """Resume, perhaps between a checkpoint and its validation."""
        super().on_start(info)
        newest = checkpoint.latest(self.run.path / "checkpoints")
        if newest is not None and info.start:
            self.on_checkpoint(info.start, newest)
        if self.best_step and steps_done(self.run.best_path) != self.best_step:
            best, path = self.run.best_path, self.run.path
            raise DataError(f"{best}: is incomplete; remove it and {path} to train the evaluation LM again")

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Validate a checkpoint, unless that was done, and save it if it is the best."""
        config = self.run.experiment.train
        if step % config.save_every and step < config.steps:
            return  # a signal or a deadline stopped the run here; a validation would change which step is the best
        if step not in self.run.validations():
            text: Any = self.run.domain
            with arithmetic("fp32"):
                nll = estimate_nll(self.run.open().method, text.test_rows.long(), Likelihood("exact"))
            record = {"step": step, METRIC: nll.value / text.space.length}
            with (self.run.path / "metrics.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
            self.on_log(record)
        if self.best_step == step:
            self._keep(folder)

    def _keep(self, newest: Path) -> None:
        """Make a checkpoint the only one of the folder of the best step."""
        best, folder = checkpoint.load(newest), self.run.best_path / "checkpoints"
        self.run.experiment.save(self.run.best_path / "experiment.json")
        checkpoint.save(folder, best.step, best.tensors, best.meta, keep=1)
        for other in folder.glob("step-*"):  # also of later steps, from a run that was removed
            if other.name != newest.name:
                shutil.rmtree(other)
