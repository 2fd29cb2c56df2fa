"""The prepared sets of the text study: their folders on this machine, and checks that they match."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emoe.domains.base import DataError
from emoe.domains.text.data import Text, TextConfig, read_manifest


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
