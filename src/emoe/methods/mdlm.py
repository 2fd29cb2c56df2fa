"""MDLM: the factorised baseline, without a latent (Eq. 3, 22)."""

from __future__ import annotations

from dataclasses import dataclass

from emoe.methods.masked import MaskedDiffusion, MaskedDiffusionConfig


@dataclass(frozen=True, kw_only=True)
class MDLMConfig(MaskedDiffusionConfig, kind="mdlm"):
    """MDLM has no options of its own."""


class MDLM(MaskedDiffusion, config=MDLMConfig):
    """One factorised reverse step (Eq. 3) per network call: Algorithms 1 and 2 with a single component."""

    label, colour = "MDLM", "#4e79a7"
