"""What a toy model's law says by itself: the measures of the toy, and its likelihood, without drawing a sample."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from emoe.config import ConfigError
from emoe.console import Tick
from emoe.domains.base import Domain
from emoe.domains.toy import Toy
from emoe.domains.toy.densities import overlap_of_law, validity_of_law
from emoe.evaluation.evaluate import make_row
from emoe.evaluation.results import Row
from emoe.exact import NODES, SAMPLES, chain_laws, kl_data_model
from emoe.experiment import Experiment
from emoe.methods.base import MaskedDiffusion, Method
from emoe.methods.vadd import VADD
from emoe.rng import derive_seed
from emoe.types import Measurement

REPEATS = 4  # independent laws, where latents are drawn


def exact_rows(
    method: Method, domain: Domain, experiment: Experiment, nfe: Iterable[int], *, tick: Tick | None = None
) -> list[Row]:
    """Validity, overlap, NLL and KL of the exact law of a toy run, convention `exact`."""
    if not isinstance(domain, Toy) or not isinstance(method, MaskedDiffusion):
        raise ConfigError([f"exact: {experiment.name} is no toy; the law of other domains is too large to enumerate"])
    return [
        make_row(item, domain, experiment, nfe=steps, convention="exact")
        for steps, items in toy_measurements(method, domain, nfe, tick=tick).items()
        for item in items
    ]


def is_drawn(method: Method) -> bool:
    """Whether the latent is too large for quadrature, so that a law is a mean over draws of it."""
    return isinstance(method, VADD) and method.config.latent not in NODES


def law_work(method: Method, nfe: Iterable[int]) -> int:
    """Times at which `laws` reads the network, a measure of how long it takes; its `tick` counts the same."""
    return len({i / steps for steps in nfe for i in range(1, steps + 1)}) * (REPEATS if is_drawn(method) else 1)


def laws(
    method: MaskedDiffusion,
    nfe: Iterable[int],
    *,
    samples: int = SAMPLES,
    repeats: int = REPEATS,
    seed: int = 0,
    tick: Tick | None = None,
) -> dict[int, Float[Tensor, "R ..."]]:
    """Laws of the T-step sampler for each T: one, or `repeats` independent ones where the latent has to be drawn.

    `tick` is told of every T that is done.
    """
    nfe = sorted(nfe)

    def told() -> Iterator[int]:
        seen: set[float] = set()
        for steps in nfe:
            yield steps  # the law of T is made before the next T is asked for
            fresh = {i / steps for i in range(1, steps + 1)} - seen
            seen |= fresh
            if tick is not None:
                tick(len(fresh), f"exact law, T = {steps}")

    if not is_drawn(method):
        return {steps: law[None] for steps, law in chain_laws(method, told()).items()}
    # As `exact.repeated_laws` draws them, which cannot be told from outside how far it is.
    again = [
        chain_laws(method, told(), samples=samples, seed=derive_seed(seed, "repeat", repeat))
        for repeat in range(repeats)
    ]
    return {steps: torch.stack([one[steps] for one in again]) for steps in nfe}


def toy_measurements(
    method: MaskedDiffusion,
    toy: Toy,
    nfe: Iterable[int],
    *,
    samples: int = SAMPLES,
    repeats: int = REPEATS,
    seed: int = 0,
    tick: Tick | None = None,
) -> dict[int, list[Measurement]]:
    """Validity, overlap, NLL and KL of the exact law of the T-step sampler, for each T.

    `validity` and `overlap` are in percent and compare with the density's own law (the ceiling of the overlap is 100).
    `nll` = -sum of data * log model and `kl` = KL(data || model), in nats per row. A method whose latent has to be
    drawn gives the measures of the mean of `repeats` independent laws, with the standard error of that.

    Args:
        method: The trained method.
        toy: The density it was trained on.
        nfe: Numbers of steps T.
        samples: Latents for each repeat, where they are drawn.
        repeats: Independent laws, where latents are drawn.
        seed: Seed of the latents.
        tick: Told how far it is.
    """
    data, support, radius = toy.cell_probabilities().double(), toy.support, toy.radius
    entropy = -data.xlogy(data).sum().item()
    measures: dict[str, Callable[[Float[Tensor, "50 50"]], float]] = {
        "validity": lambda law: validity_of_law(law, support, radius),
        "overlap": lambda law: overlap_of_law(law, data),
        "nll": lambda law: entropy + kl_data_model(data, law),
        "kl": lambda law: kl_data_model(data, law),
    }
    found: dict[int, list[Measurement]] = {}
    for steps, several in laws(method, nfe, samples=samples, repeats=repeats, seed=seed, tick=tick).items():
        found[steps] = []
        for name, measure in measures.items():
            each = [measure(law) for law in several]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
            found[steps].append(Measurement(name, measure(several.mean(0)), error, None))
    return found
