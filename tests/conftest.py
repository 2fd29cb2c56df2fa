"""Checked shapes, one thread, and tiny models: what every test shares."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Shapes and types in the signatures of the package are checked in this process, if beartype is there. It must happen
# before the package is imported for the first time; processes that a test starts import it unchecked.
if importlib.util.find_spec("beartype") is not None and "emoe" not in sys.modules:
    from jaxtyping import install_import_hook

    install_import_hook("emoe", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import pytest
import torch
from steps import scramble

from emoe.backbones.transformer import TransformerConfig
from emoe.methods.base import MethodConfig
from emoe.methods.emoe import EMoEConfig
from emoe.methods.masked import MaskedDiffusion, MaskedDiffusionConfig
from emoe.methods.mdlm import MDLMConfig
from emoe.types import TokenSpace

torch.set_num_threads(1)


def build_tiny(
    config: MethodConfig | None = None,
    *,
    size: int = 3,
    mask_id: int = 1,
    length: int = 2,
    depth: int = 2,
    seed: int = 21,
    timeless: bool = False,
    dtype: torch.dtype = torch.float64,
    **backbone: object,
) -> MaskedDiffusion:
    """A method small enough to enumerate, with routers far from uniform and experts that differ.

    Args:
        config: The method; E-MoE with two experts by default.
        size: V, the mask included.
        mask_id: By default not the last symbol, so that nothing can assume that it is.
        length: L.
        depth: D.
        seed: Seed of the weights; the default gives strong ties between positions.
        timeless: Make the network ignore the time.
        dtype: Precision of the weights.
        backbone: Other sizes of the transformer.
    """
    sizes = {"width": 8, "heads": 2, "hidden": 8, "time_size": 4, "dispatch": "loop"} | backbone
    space = TokenSpace(size=size, mask_id=mask_id, length=length)
    method = (config or EMoEConfig(experts=2)).build(space, TransformerConfig(depth=depth, **sizes)).to(dtype)
    scramble(method, seed)
    if timeless:
        with torch.no_grad():
            for parameter in method.backbone.trunk.time[-1].parameters():
                parameter.zero_()
    return method


@pytest.fixture(scope="session")
def tiny() -> Callable[..., MaskedDiffusion]:
    """`build_tiny`: a factory of models that can be enumerated."""
    return build_tiny


@pytest.fixture(scope="session")
def data_root() -> Callable[[Sequence[str]], Path]:
    """Where the named published files lie: below EMOE_DATA, else in the data folder beside the checkout; else skip."""
    from emoe.domains.base import DataError
    from emoe.domains.images import files

    folder = os.environ.get("EMOE_DATA")
    root = Path(folder) if folder else Path(__file__).resolve().parents[2] / "shared" / "data"

    def find(names: Sequence[str]) -> Path:
        try:
            files.find(root, names)
        except DataError:
            pytest.skip(f"{names[0]} and the like are not here; set EMOE_DATA")
        return root

    return find


@pytest.fixture(scope="session", name="scramble")
def scramble_fixture() -> Callable[..., torch.nn.Module]:
    """`scramble`: weights for any module that do not depend on its initialisation."""
    return scramble


@pytest.fixture(scope="session")
def twins() -> Callable[..., tuple[MaskedDiffusion, MaskedDiffusion]]:
    """A factory of (E-MoE with one expert, MDLM) with the same weights."""

    def build(config: EMoEConfig | None = None, **sizes: object) -> tuple[MaskedDiffusion, MaskedDiffusion]:
        config = dataclasses.replace(config or EMoEConfig(), experts=1, top_k=1)
        routed = build_tiny(config, **sizes)
        shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(MaskedDiffusionConfig)}
        dense = build_tiny(MDLMConfig(**shared), **sizes)
        copied = dense.state_dict()
        for name, value in routed.state_dict().items():
            if ".mlp.experts." in name:
                stem, part = name.split("experts.")
                target = {"w_in": "0.weight", "b_in": "0.bias", "w_out": "2.weight", "b_out": "2.bias"}[part]
                copied[stem + target] = value[0].T.contiguous() if part.startswith("w") else value[0]
            elif ".router." not in name:
                copied[name] = value
        dense.load_state_dict(copied)
        return routed, dense

    return build
