"""A trained model: the experiment, the method with its weights, and the data on first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import Domain, Ink
from emoe.engine.callbacks import FitResult
from emoe.evaluation.likelihood import estimate_nll, held_out_rows
from emoe.evaluation.measure import measure_samples
from emoe.experiment import Experiment
from emoe.methods.base import Method
from emoe.rng import Rng, derive_seed
from emoe.runs.completion import Completion, Given, Keep, complete, token_rows
from emoe.runs.sampling import Pool, draw
from emoe.types import Likelihood, Measurement

if TYPE_CHECKING:
    from emoe.reporting.results import Row


class Run:
    """A trained model, opened from a run folder or from released weights; the method is in evaluation mode.

    `repr`, `==` and `hash` depend on path and step only.

    Args:
        path: Its folder.
        experiment: What was trained.
        method: The method with trained weights.
        step: Training steps behind the weights.
        result: How the training ended, if it ended just now.
        name: How messages call it; None: its path.
        licence: Licence of released weights.
        domain: The domain, if the caller has built it already.
    """

    def __init__(
        self,
        path: Path,
        experiment: Experiment,
        method: Method,
        step: int,
        *,
        result: FitResult | None = None,
        name: str | None = None,
        licence: str | None = None,
        domain: Domain | None = None,
    ):
        self.path, self.experiment, self.method, self.step = path, experiment, method, step
        self.result, self.name, self.licence = result, name or str(path), licence
        if domain is not None:
            vars(self)["domain"] = domain

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.experiment.method.kind}, step {self.step})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and (self.path, self.step) == (other.path, other.step)

    def __hash__(self) -> int:
        return hash((self.path, self.step))

    @cached_property
    def domain(self) -> Domain:
        """The data, metrics and figures of the experiment; read when it is first asked for.

        Raises:
            DataError: The data are not here; sampling does without them.
            ConfigError: They have other symbols or another length than the model.
        """
        domain = self.experiment.domain.build(self.experiment.seed)
        if domain.space != self.method.space:
            raise ConfigError([f"domain: the data have {domain.space}, but {self.name} has {self.method.space}"])
        return domain

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.method.parameters()).device

    @property
    def default_nfe(self) -> int:
        """The fewest network calls that the experiment evaluates, most often 1."""
        return min(self.experiment.eval.nfe)

    @property
    def eval_file(self) -> Path | None:
        """Where `emoe eval` keeps the rows of this run; None for released weights, which may not be writable."""
        return self.path / "eval.json" if (self.path / "experiment.json").exists() else None

    def sample(
        self,
        n: int,
        nfe: int | None = None,
        *,
        seed: int = 0,
        given: Int[Tensor, "n L"] | np.ndarray | Sequence[Sequence[int]] | None = None,
    ) -> Int[Tensor, "n L"]:
        """Draw `n` rows with `nfe` network calls, by the experiment's sampler and batch.

        Tokens of `given` that are neither -1 nor the mask stay as they are.
        """
        return self.pool(n, nfe, seed=seed, given=given).samples

    def pool(self, n: int, nfe: int | None = None, *, seed: int = 0, given: Any = None) -> Pool:
        """`sample`, with the number of network calls and the time it took."""
        rows = None if given is None else token_rows(given, self.method.space)
        config = self.experiment.eval
        nfe = self.default_nfe if nfe is None else nfe
        return draw(self.method, n, nfe, seed=seed, batch=config.batch, given=rows, sampler=config.sampler)

    def complete(
        self,
        given: Given,
        n: int = 1,
        nfe: int | None = None,
        *,
        seed: int = 0,
        keep: Keep = None,
        ink: Ink = "auto",
    ) -> Completion:
        """Draw `n` completions of each given row, image or text, which may be files; see `emoe.runs.completion`."""
        return complete(self, given, n, nfe, seed=seed, keep=keep, ink=ink)

    def nll(
        self, rows: Int[Tensor, "m L"] | np.ndarray | None = None, likelihood: str = "bound@1", *, seed: int = 0
    ) -> Measurement:
        """Mean of a named likelihood in nats per row, of these rows or of held-out ones."""
        if rows is None:
            rows = held_out_rows(self.domain, None, seed)
        return estimate_nll(self.method, torch.as_tensor(rows).long(), Likelihood.parse(likelihood), seed=seed)

    def evaluate(
        self, *, nfe: Iterable[int] | None = None, samples: int | None = None, seed: int | None = None
    ) -> list[Row]:
        """All metrics of the domain at each NFE, as rows of results."""
        return measure_samples(self.method, self.domain, self.experiment, nfe=nfe, samples=samples, seed=seed)

    @torch.no_grad()
    def log_probs(
        self, xt: Int[Tensor, "B L"], *, routes: Literal["greedy", "drawn"] = "drawn", seed: int = 0
    ) -> Float[Tensor, "B L V"]:
        """log p(x0 | xt, z) of rows with masks, for a latent that is drawn from the prior or its most likely value.

        The time is the share of masked positions. Clean positions have all probability on their token.
        """
        rng = Rng(derive_seed(seed, "log_probs"), device=self.device)
        return self.method.log_probs(xt.to(self.device), rng, greedy=routes == "greedy")
