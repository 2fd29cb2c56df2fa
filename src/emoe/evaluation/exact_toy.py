"""What a toy model's law says by itself: the measures of the toy, and its likelihood, without drawing a sample."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from jaxtyping import Float
from torch import Tensor

from emoe.domains.toy import Toy
from emoe.domains.toy.metrics import overlap_of_law, validity_of_law
from emoe.exact import NODES, SAMPLES, chain_laws, kl_data_model, repeated_laws
from emoe.methods.base import MaskedDiffusion
from emoe.methods.vadd import VADD
from emoe.types import Measurement


def toy_measurements(
    method: MaskedDiffusion, toy: Toy, nfe: Iterable[int], *, samples: int = SAMPLES, repeats: int = 4, seed: int = 0
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
    """
    data, support, radius = toy.cell_probabilities().double(), toy.support, toy.radius
    entropy = -data.xlogy(data).sum().item()
    measures: dict[str, Callable[[Float[Tensor, "50 50"]], float]] = {
        "validity": lambda law: validity_of_law(law, support, radius),
        "overlap": lambda law: overlap_of_law(law, data),
        "nll": lambda law: entropy + kl_data_model(data, law),
        "kl": lambda law: kl_data_model(data, law),
    }
    if isinstance(method, VADD) and method.config.latent not in NODES:
        drawn = repeated_laws(method, nfe, repeats=repeats, samples=samples, seed=seed)
    else:
        drawn = {steps: law[None] for steps, law in chain_laws(method, nfe).items()}
    found: dict[int, list[Measurement]] = {}
    for steps, laws in drawn.items():
        found[steps] = []
        for name, measure in measures.items():
            each = [measure(law) for law in laws]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
            found[steps].append(Measurement(name, measure(laws.mean(0)), error, None))
    return found
