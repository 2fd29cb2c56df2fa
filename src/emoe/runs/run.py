"""A trained model: the experiment, the method with its weights, and the data on first use; completions of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emoe.config import ConfigError
from emoe.domains.base import Domain, DomainConfig, Ink
from emoe.engine.arithmetic import Precision
from emoe.engine.callbacks import FitResult
from emoe.evaluation.measure import estimate_nll, fields_of, held_out_rows, rows_of
from emoe.experiment import Experiment
from emoe.figures.base import save
from emoe.methods.base import Method
from emoe.reporting.results import Row
from emoe.rng import Rng, derive_seed
from emoe.runs.sampling import Pool, Rows, draw, token_rows
from emoe.types import Likelihood, Measurement, TokenSpace

Source = str | Path
Given = Source | Sequence[Source] | Tensor | np.ndarray
Keep = str | Tensor | np.ndarray | None


@dataclass(frozen=True)
class Completion:
    """Rows, the tokens of them that stay, and n completions of each."""

    rows: Rows  # as read, with the mask for tokens that are not given
    given: Rows  # with the mask for all tokens that are drawn
    samples: Int[Tensor, "m n L"]
    nfe: int
    space: TokenSpace
    domain: DomainConfig

    @property
    def kept(self) -> Bool[Tensor, "m L"]:
        """Positions whose tokens stay."""
        return self.given != self.space.mask_id

    @property
    def pool(self) -> Int[Tensor, "N L"]:
        """All completions as rows, those of the first given row first."""
        return self.samples.flatten(0, 1)

    @property
    def texts(self) -> list[list[str]]:
        """The completions of each given row as text of the domain."""
        return [self.domain.write(rows) for rows in self.samples]

    def picture(self, path: Source) -> None:
        """Write an image of the rows as read, the tokens that stay, and the completions."""
        save(self.domain.completion_figure(self.rows, self.given, self.samples, self.space), Path(path))


@dataclass(unsafe_hash=True, repr=False)
class Run:
    """A trained model of a run folder or of released weights, in evaluation mode; equal by path and step."""

    path: Path
    experiment: Experiment = field(compare=False)
    method: Method = field(compare=False)
    step: int
    result: FitResult | None = field(default=None, compare=False)  # the end of training, as `train` sets it
    name: str = field(default="", compare=False)  # in messages; default: the path
    licence: str | None = field(default=None, compare=False)  # of released weights

    def __post_init__(self) -> None:
        self.name = self.name or str(self.path)

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.experiment.method.kind}, step {self.step})"

    @cached_property
    def domain(self) -> Domain:
        """The data, metrics and figures of the experiment, read on first use; sampling does not need them.

        Raises:
            DataError: The data are missing.
            ConfigError: They have other symbols or another length than the model.
        """
        domain = self.experiment.domain.build(self.experiment.seed)
        if domain.space != self.method.space:
            raise ConfigError([f"domain: the data have {domain.space}, but {self.name} has {self.method.space}"])
        return domain

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.method.parameters()).device

    @property
    def default_nfe(self) -> int:
        """The smallest NFE that the experiment evaluates, most often 1."""
        return min(self.experiment.eval.nfe)

    @property
    def eval_file(self) -> Path | None:
        """The results file of `emoe eval`; None for released weights, which may not be writable."""
        return self.path / "eval.json" if (self.path / "experiment.json").exists() else None

    def sample(
        self,
        n: int,
        nfe: int | None = None,
        *,
        seed: int = 0,
        given: Int[Tensor, "n L"] | np.ndarray | Sequence[Sequence[int]] | None = None,
        precision: Precision | None = None,
    ) -> Int[Tensor, "n L"]:
        """Draw `n` rows with `nfe` network calls and the experiment's sampler; for the other options see `draw`."""
        return self.pool(n, nfe, seed=seed, given=given, precision=precision).samples

    def pool(self, n: int, nfe: int | None = None, **options: Any) -> Pool:
        """`sample` with the same options; returns also the number of network calls and the time."""
        nfe, config = self.default_nfe if nfe is None else nfe, self.experiment.eval
        return draw(self.method, n, nfe, batch=config.batch, sampler=config.sampler, **options)

    def complete(
        self, given: Given, n: int = 1, nfe: int | None = None, *, seed: int = 0, keep: Keep = None, ink: Ink = "auto"
    ) -> Completion:
        """Draw `n` completions of every given row with `nfe` network calls each.

        Args:
            given: One or several files (.png for images; .txt for text; .npy, .csv), rows written out (`12,?`), or
                texts with holes (`The cat ___ a bird.`, see `emoe.domains.text.data`); or rows as an array of shape
                (L,) or (m, L) with -1 or the mask for tokens to be drawn.
            n: Completions of each row.
            nfe: Network calls; default: the fewest of the experiment.
            seed: Seed of the draw.
            keep: The given tokens that stay: a region of the domain (`top-half` for images), positions (`0-9,20`),
                none, or an array of booleans of shape (L,) or (m, L); default: all.
            ink: Colour of the ink of image files: dark, light, or auto, which looks at the border.

        Raises:
            ConfigError: Arguments that cannot be used, or nothing to fill in.
            DataError: A file that cannot be used.
        """
        if n < 1:
            raise ConfigError([f"n: must be >= 1, got {n}"])
        space, domain = self.method.space, self.experiment.domain
        rows, masked = prepare(space, domain, given, keep=keep, ink=ink)
        repeated = masked.repeat_interleave(n, 0)
        pool, kept = self.pool(len(repeated), nfe, seed=seed, given=repeated), repeated != space.mask_id
        if not torch.equal(pool.samples[kept], repeated[kept]):
            raise AssertionError("the sampler changed tokens that were given")
        return Completion(rows, masked, pool.samples.unflatten(0, (len(rows), n)), pool.nfe, space, domain)

    def nll(
        self, rows: Int[Tensor, "m L"] | np.ndarray | None = None, likelihood: str = "bound@1", *, seed: int = 0
    ) -> Measurement:
        """Mean of a named likelihood in nats per row, of these rows or by default of held-out ones."""
        if rows is None:
            rows = held_out_rows(self.domain, None, seed)
        return estimate_nll(self.method, torch.as_tensor(rows).long(), Likelihood.parse(likelihood), seed=seed)

    def evaluate(
        self,
        *,
        nfe: Iterable[int] | None = None,
        samples: int | None = None,
        seed: int | None = None,
        keep: Callable[[Pool], None] | None = None,
    ) -> list[Row]:
        """All metrics of the domain at each NFE, as rows of results; `keep` is called with every pool.

        The sampler and the defaults are those of the experiment.
        """
        config, rows = self.experiment.eval, list[Row]()
        seed = self.experiment.seed if seed is None else seed
        for calls in config.nfe if nfe is None else nfe:
            pool = self.pool(samples or config.samples, calls, seed=seed)
            if keep is not None:
                keep(pool)
            items = [*self.domain.measure(pool.samples, seed)]
            if config.sampler.kind != "plain":
                items.append(Measurement("network_calls", pool.calls, None, len(pool.samples)))
            rows += rows_of(fields_of(self.domain, self.experiment, nfe=calls), {None: items})
        return rows

    @torch.no_grad()
    def log_probs(
        self, xt: Int[Tensor, "B L"], *, routes: Literal["greedy", "drawn"] = "drawn", seed: int = 0
    ) -> Float[Tensor, "B L V"]:
        """log p(x0 | xt, z) of rows with masks, for a latent z drawn from the prior or its most likely value.

        The time is the share of masked positions. At clean positions the token has probability 1.
        """
        rng = Rng(derive_seed(seed, "log_probs"), device=self.device)
        return self.method.log_probs(xt.to(self.device), rng, greedy=routes == "greedy")


def prepare(
    space: TokenSpace, domain: DomainConfig, given: Given, *, keep: Keep = None, ink: Ink = "auto"
) -> tuple[Rows, Rows]:
    """The rows as given, and with the mask for all tokens that are drawn; see `Run.complete`."""
    if isinstance(given, Tensor | np.ndarray):
        rows = token_rows(given, space)
    else:
        sources = [given] if isinstance(given, str | Path) else given
        rows = torch.cat([domain.read_given(str(source), space, ink=ink) for source in sources])
    wanted = rows == space.mask_id
    if keep is not None:
        kept = domain.read_keep(keep, space) if isinstance(keep, str) else torch.as_tensor(keep).cpu()
        if kept.dtype != torch.bool or kept.shape not in (rows.shape, rows.shape[1:]):
            raise ConfigError([f"keep: expected booleans of shape {tuple(rows.shape[1:])} or {tuple(rows.shape)}"])
        if (empty := kept & wanted).any():
            row, position = empty.nonzero()[0].tolist()
            raise ConfigError([f"keep: position {position} is to stay, but given row {row} has no token there"])
        wanted = ~kept.expand_as(rows)
    if full := (~wanted.any(1)).nonzero().flatten().tolist():
        reason = "all tokens stay" if keep is not None else "all tokens are given; say with --keep which of them stay"
        raise ConfigError([f"given: nothing to fill in, in row {full[0]} {reason}"])
    return rows, rows.masked_fill(wanted, space.mask_id)


def check_beginnings(given: Rows, space: TokenSpace) -> None:
    """Raise a ConfigError unless the given tokens of each row come before all masks."""
    masked = given == space.mask_id
    if rows := (masked[:, :-1] & ~masked[:, 1:]).any(1).nonzero().flatten().tolist():
        raise ConfigError([f"continue: row {rows[0]} has a hole before its last word; use --given to fill holes"])
