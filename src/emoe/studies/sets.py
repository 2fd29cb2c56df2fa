"""The prepared sets of the text study: where they are on this machine, and whether they fit together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emoe.domains.base import DataError
from emoe.domains.text.data import Text, TextConfig, read_manifest
from emoe.studies.scores import describe_text


class Sets:
    """Sets by their configs.

    Args:
        config: The models' text.
        lm_config: The text of the evaluation LM.
        folder: Where the first is, if not at its path.
        lm_folder: Where the second is.
        zero_shot: Text from elsewhere.
    """

    def __init__(
        self, config: Any, lm_config: Any, folder: Path | None, lm_folder: Path | None, zero_shot: Path | None
    ):
        self.config, self.lm_config, self.zero_shot = config, lm_config, zero_shot
        self.folders = {config.path: folder or Path(config.path), lm_config.path: lm_folder or Path(lm_config.path)}
        self._built: dict[TextConfig, Text] = {}

    def open(self, config: Any) -> Text:
        """A set, which has the name of its path wherever it is."""
        if config not in self._built:
            self._built[config] = Text(config, self.folders[config.path])
        return self._built[config]

    @functools.cached_property
    def lm_text(self) -> Text | None:
        """The text of the evaluation LM; None if it is not on this machine."""
        try:
            return self.open(self.lm_config)
        except DataError:
            return None

    @functools.cached_property
    def elsewhere(self) -> Text | None:
        """The text of --zero-shot, which must have the tokens of the models."""
        if self.zero_shot is None:
            return None
        text, own = TextConfig(path=str(self.zero_shot)).build(0), self.open(self.config)
        if describe_text(text)["tokenizer"] != describe_text(own)["tokenizer"] or text.space != own.space:
            problem = f"{self.zero_shot} has another tokenizer or length than {own.name}"
            raise DataError(f"zero-shot: {problem}; prepare it with the same")
        return text

    def holding(self, manifest: Mapping[str, Any]) -> Text:
        """A set with the tokens and held-out rows of a pool: that of the models, or of the evaluation LM."""
        for config in (self.config, self.lm_config):
            try:
                splits = read_manifest(self.folders[config.path])["splits"]
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
        """Refuse a missing set with the option for it."""
        try:
            read_manifest(self.folders[self.config.path])
        except DataError as error:
            problem = str(error).partition(";")[0]
            raise DataError(f"set: {problem}; give --set FOLDER, which emoe data prepare wrote") from None

    def check_eval_lm(self) -> None:
        """Refuse, before anything is trained, text of the evaluation LM that is missing or not other text."""
        folder = self.folders[self.lm_config.path]
        try:
            own = read_manifest(folder)
        except DataError as error:
            raise DataError(
                f"eval-lm-set: {str(error).partition(';')[0]}; give --eval-lm-set FOLDER, text that no model saw, "
                "prepared with the same tokenizer, or one part alone: --only train"
            ) from None
        if "valid" not in own["splits"]:
            problem = "has no validation rows, which decide when to stop; prepare it with --split"
            raise DataError(f"eval-lm-set: {folder} {problem}")
        try:
            other = read_manifest(self.folders[self.config.path])
        except DataError:
            return  # the evaluation LM may be trained on a machine without the models' text
        if (own["tokenizer"]["sha256"], own["length"]) != (other["tokenizer"]["sha256"], other["length"]):
            problem = "has another tokenizer or length than --set; prepare it with the same"
            raise DataError(f"eval-lm-set: {folder} {problem}")
        known = {item["sha256"] for item in other["inputs"]}
        for item in own["inputs"]:
            if "train" in item["starts"] and item["sha256"] in known:
                problem = f"trains on {item['path']}, which is in --set too; leave that file out of it"
                raise DataError(f"eval-lm-set: {folder} {problem}")
