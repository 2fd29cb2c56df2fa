"""`step_aware`: a network that is told how many steps the sampler takes, trained on bounds of many samplers at once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from enumeration import ALPHA, chi_square
from torch import Tensor

from emoe.backbones.dit import DiTConfig
from emoe.config import ConfigError
from emoe.diffusion.masking import mask_tokens, reveal_probability
from emoe.diffusion.schedule import CosineSchedule, LinearSchedule, Schedule
from emoe.diffusion.times import MANY, step_counts
from emoe.exact import chain_law
from emoe.methods import base
from emoe.methods.base import MaskedDiffusion, Predicted, SamplerConfig, log_token_of
from emoe.methods.emoe import EMoE, EMoEConfig, Passes
from emoe.methods.mdlm import MDLMConfig
from emoe.methods.vadd import VADDConfig
from emoe.ramps import Constant, Linear
from emoe.rng import Rng
from emoe.types import Convention, TokenSpace
from emoe.verify import verify

ONE = torch.tensor(1.0, dtype=torch.float64)
EMOE = EMoEConfig(experts=2, step_aware=True, elbo_power=Constant(value=1.0))
VADD = VADDConfig(latent=1, step_aware=True)
SIGMAS = 4.5


def knobs_of(method: MaskedDiffusion) -> dict[str, Tensor]:
    return {name: ONE for name in method.ramps}


def test_numbers_of_steps_are_powers_of_two_and_often_the_most() -> None:
    counts = step_counts(40_000, 12, torch.Generator().manual_seed(0))
    share = (1 - MANY) / 4
    found = torch.tensor([(counts == steps).sum() for steps in (1, 2, 4, 8)])
    assert found.sum() == len(counts)
    assert chi_square(found, torch.tensor([share, share, share, share + MANY])) > ALPHA
    assert (step_counts(100, 1, torch.Generator().manual_seed(0)) == 1).all()


def test_times_are_those_that_the_sampler_visits(tiny: Any) -> None:
    t, steps = tiny(EMOE, length=4, mask_id=2).training_times(30_000, {}, Rng(0))
    place = t * steps
    assert torch.equal(place, place.round()) and (place >= 1).all() and (place <= steps).all()
    at_four = place[steps == 4].long() - 1
    assert chi_square(torch.bincount(at_four, minlength=4), torch.full((4,), 0.25)) > ALPHA


def test_a_share_of_rows_has_one_or_two_steps(tiny: Any) -> None:
    method = tiny(dataclasses.replace(EMOE, few_steps=Linear(start=0.9, end=0.0, share=0.4)), length=8, mask_id=2)
    assert method.ramps["few_steps"](20, 100) == pytest.approx(0.45)
    usual = (1 - MANY) / 4
    for share in (0.0, 0.6):
        knobs = knobs_of(method) | {"few_steps": torch.tensor(share)}
        t, steps = method.training_times(40_000, knobs, Rng(0))
        found = torch.tensor([(steps == count).sum() for count in (1, 2, 4, 8)])
        few, many = (1 - share) * usual + share / 2, (1 - share) * usual
        assert chi_square(found, torch.tensor([few, few, many, many + (1 - share) * MANY])) > ALPHA
        assert torch.equal(t * steps, (t * steps).round())
    plain = tiny(EMOE, length=8, mask_id=2)
    assert "few_steps" not in plain.ramps  # and its rows are those that they were before there was such a thing
    never = method.training_times(100, knobs | {"few_steps": torch.tensor(0.0)}, Rng(0))
    assert all(torch.equal(a, b) for a, b in zip(plain.training_times(100, {}, Rng(0)), never, strict=True))


@pytest.mark.parametrize("schedule", [LinearSchedule(), CosineSchedule()], ids=["linear", "cosine"])
def test_the_loss_of_a_row_is_what_its_step_adds_to_the_bound(tiny: Any, schedule: Schedule) -> None:
    """T [a_i * masked NLL + KL], with a_i of Eq. 37: a draw of bound@T, whose KL is paid at every step."""
    method = tiny(dataclasses.replace(EMOE, schedule=schedule), length=4, mask_id=2)
    x0 = torch.randint(0, 2, (6, 4), generator=torch.Generator().manual_seed(1))
    steps, i = torch.tensor([1.0, 2, 2, 4, 4, 4]), torch.tensor([1.0, 1, 2, 1, 2, 4])
    t, before = i / steps, (i - 1) / steps
    xt = mask_tokens(x0, schedule.alpha(t), method.space.mask_id, torch.Generator().manual_seed(2))
    loss = method.objective(x0, xt, t, knobs_of(method), Rng(3), steps).loss
    out = method.infer(x0, xt, steps.log() / math.log(4), knobs_of(method), Rng(3))
    alpha_s = torch.where(before == 0, 1.0, schedule.alpha(before))
    reveal = torch.as_tensor(reveal_probability(alpha_s, schedule.alpha(t)))
    want = steps * (reveal * -log_token_of(out, x0).sum(-1) + out.kl)
    assert torch.allclose(loss, want.to(loss.dtype), rtol=1e-6)


@pytest.mark.parametrize("config", [EMOE, VADD], ids=["emoe", "vadd"])
def test_the_training_loss_is_the_bound_of_the_sampler(tiny: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = tiny(config, length=4, mask_id=2)
    x0 = torch.randint(0, 2, (400, 4), generator=torch.Generator().manual_seed(1))
    for steps in (1, 4):
        monkeypatch.setattr(base, "step_counts", lambda count, most, _, steps=steps: torch.full((count,), float(steps)))
        bound = Convention.parse(f"bound@{steps}")
        with torch.no_grad():
            loss = torch.stack([4 * method(x0, knobs_of(method), Rng(7).at(draw)).total for draw in range(60)])
        want = torch.stack([method.nll_bound(x0, bound, Rng(8).at(draw)).mean() for draw in range(60)])
        error = math.sqrt((loss.var() + want.var()).item() / 60)
        assert abs(loss.mean() - want.mean()) < SIGMAS * error


@pytest.mark.parametrize("config", [EMOE, VADD], ids=["emoe", "vadd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_samples_follow_the_exact_law_of_their_number_of_steps(tiny: Any, config: Any, steps: int) -> None:
    method = tiny(config, length=2, mask_id=2)
    law = chain_law(method, steps)
    for kind in ("plain", "cached"):  # the second is refused to a network that reads the time
        rows = method.sample(20_000, steps, Rng(steps), sampler=SamplerConfig(kind=kind))
        assert chi_square(torch.bincount(rows[:, 0] * 2 + rows[:, 1], minlength=4), law.flatten()) > ALPHA


def test_all_checks_of_a_run_hold(tiny: Any) -> None:
    """`emoe verify`: samples, bounds and gradients against the exact laws of each number of steps."""
    method = tiny(dataclasses.replace(EMOE, relax_tau=Constant(value=0.5)), length=2, mask_id=2)
    found = list(verify(method, torch.tensor([[0, 1], [1, 1]]), steps=(1, 3)))
    assert len(found) > 8 and all(check.passed for check in found), found


def test_the_network_is_told_the_number_of_steps_and_not_the_time(tiny: Any) -> None:
    method = tiny(EMOE, length=4, mask_id=2)
    told: list[Tensor] = []
    method.backbone.register_forward_pre_hook(lambda _, inputs: told.append(inputs[1]))
    method.sample(3, 2, Rng(0))
    assert len(told) == 2 and all((one == 0.5).all() for one in told)
    told.clear()
    x0 = torch.zeros(5, 4, dtype=torch.int64)
    for name, code in (("bound@1", 0.0), ("bound@4", 1.0), ("bound@64", 1.0), ("iw@2,3", 0.5), ("objective", 1.0)):
        method.nll_bound(x0, Convention.parse(name), Rng(0))
        assert (told.pop() == code).all(), name


def test_without_it_nothing_changes(tiny: Any) -> None:
    """The time is told, and losses are those of Eq. 9."""
    method = tiny(EMoEConfig(experts=2), length=4, mask_id=2)
    t, steps = method.training_times(8, {}, Rng(0))
    assert steps is None and torch.equal(method.told(t, torch.full_like(t, 3.0)), t)
    assert torch.equal(method.recon_weight(t, None), 1 / t)


def small_dit(config: Any, **changes: Any) -> Any:
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "hidden": 16, "cond_size": 8, "time_size": 8}
    return config.build(TokenSpace(9, 8, 8), DiTConfig(**(sizes | {"dropout": 0.0, "dispatch": "loop"} | changes)))


def test_a_prediction_can_be_kept_since_no_time_is_read() -> None:
    """The sampler `cached` is refused to networks that read the time; here they read what does not change."""
    torch.manual_seed(0)
    aware = small_dit(EMOE, time_conditioning=True)
    assert not aware.reads_time and (aware.sample(4, 8, Rng(0), sampler=SamplerConfig(kind="cached")) < 8).all()
    plain = small_dit(EMoEConfig(experts=2), time_conditioning=True)
    with pytest.raises(ConfigError, match="reads the time"):
        plain.sample(4, 8, Rng(0), sampler=SamplerConfig(kind="cached"))


def test_free_nats_are_those_of_one_and_two_steps(tiny: Any) -> None:
    method = tiny(EMoEConfig(experts=2, step_aware=True, free_nats=0.5), length=8)
    assert isinstance(method, EMoE)
    told = method.told(torch.ones(4), torch.tensor([1.0, 2, 4, 8]))
    kl = torch.tensor([[0.2, 0.9], [0.4, 0.3], [0.1, 0.1], [0.3, 0.2]])  # of blocks; the first two rows: 0.3 and 0.6
    nothing = Passes(Predicted(None, None), (), (), (), ())
    counted = method._train_kl(kl, nothing, torch.zeros(4, 8, dtype=torch.int64), told)
    assert counted is not None and torch.allclose(counted, torch.tensor([0.9, 0.3, 0.2, 0.5]))


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ConfigError, match="step_aware: has no meaning without a latent"):
        MDLMConfig(step_aware=True)
    with pytest.raises(ConfigError, match="few_steps: has no meaning without step_aware"):
        small_dit(EMoEConfig(experts=2, few_steps=Constant(value=0.5)), time_conditioning=True)
    with pytest.raises(ConfigError, match=r"backbone.time_conditioning: must be true"):
        small_dit(EMOE)
