"""Rows, batches, laws and measures of every domain are those that recorded results were made with.

`EMOE_GOLDEN=exact` asks for equal floats to the last bit, `EMOE_GOLDEN=write` stores new ones; see test_golden.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from emoe.domains.base import Domain
from emoe.domains.images import DigitsConfig, Images, MNISTConfig, files
from emoe.domains.rows import RowsConfig
from emoe.domains.text import PrepareConfig
from emoe.domains.text.data import TextConfig
from emoe.domains.text.prepare import prepare
from emoe.domains.ties import TiesConfig
from emoe.domains.toy import Density, ToyConfig

pytestmark = pytest.mark.golden
STORED = Path(__file__).parents[1] / "golden" / "domains.json"
MODE = os.environ.get("EMOE_GOLDEN", "close")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x", "##y", ".", ",", "'", "s"]
DataRoot = Callable[[list[str]], Path]


def digest(data: Tensor | bytes) -> str:
    content = data if isinstance(data, bytes) else data.cpu().long().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def of_domain(domain: Domain, samples: Tensor, batch: int = 12) -> dict[str, Any]:
    """Hashes of the rows that a domain gives, and what it measures of samples."""
    batches = [domain.batches(batch, 3, rank=rank, world=world) for rank, world in ((0, 1), (1, 2))]
    return {
        "name": domain.name,
        "space": list(vars(domain.space).values()),
        "rows": digest(domain.rows.long()),
        "batches": [digest(make(step)) for make in batches for step in (0, 7, 1_000)],
        "fresh": [digest(domain.fresh(10, seed)) for seed in (0, 5)],
        "measured": {item.metric: [item.value, item.stderr, item.n] for item in domain.measure(samples, 2)},
    }


def noise(domain: Domain, n: int) -> Tensor:
    """Rows of which half are training rows, the others have symbols drawn at random."""
    generator = torch.Generator().manual_seed(4)
    symbols = torch.tensor([symbol for symbol in range(domain.space.size) if symbol != domain.space.mask_id])
    drawn = symbols[torch.randint(len(symbols), (n, domain.space.length), generator=generator)]
    picked = torch.randint(len(domain.rows), (n // 2,), generator=generator)
    drawn[: n // 2] = torch.stack([domain.rows[index].long() for index in picked.tolist()])
    return drawn


def toy(density: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for seed, points in ((0, 20_000), (1, 500)):
        domain = ToyConfig(density=density, points=points).build(seed)
        law = domain.density.law()
        cells = torch.arange(2_500, dtype=torch.float64)
        moments = [law.sum(), law.flatten() @ cells, law.square().sum(), law.max()]
        numbers[str(seed)] = of_domain(domain, noise(domain, 400)) | {"law": [float(value) for value in moments]}
    return numbers


def ties(family: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for length, symbols, seed in ((2, 5, 0), (4, 3 if family != "permutations" else 4, 1), (16, 8, 2)):
        domain = TiesConfig(family=family, length=length, symbols=symbols, points=1_000).build(seed)
        law = [*map(domain.ideal, (1, 2, 4, 16))]
        numbers[f"{length}-{symbols}"] = of_domain(domain, noise(domain, 200)) | {"law": law}
    return numbers


def images(domain: Images) -> dict[str, Any]:
    parts = {"test": digest(domain.test_rows), "labels": digest(torch.cat([domain.labels, domain.test_labels]))}
    return of_domain(domain, noise(domain, 400)) | parts


def own_rows(ending: str, folder: Path) -> dict[str, Any]:
    rows = np.random.default_rng(0).integers(4, size=(300, 5))
    path = folder / f"own{ending}"
    if ending == ".csv":
        np.savetxt(path, rows, fmt="%d", delimiter=";", header="a;b;c;d;e", comments="")
    elif ending == ".npz":
        np.savez_compressed(path, rows=rows, other=rows[0])
    else:
        np.save(path, rows.astype(np.float32))
    domain = RowsConfig(path=str(path), key="rows" if ending == ".npz" else None, held_out=0.2).build(7)
    return of_domain(domain, noise(domain, 50))


def lines(count: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    words = [*"abcdefgh", "axy", "bx.", "zz", "a,", "A", "d's"]
    return "\n".join(" ".join(draw.choice(words, 9)) if draw.random() > 0.15 else "" for _ in range(count)) + "\n"


def set_of(done: Path) -> dict[str, Any]:
    """What the files of a prepared set hold, without paths and versions."""
    manifest = json.loads((done / "manifest.json").read_bytes())
    inputs = [{k: v for k, v in item.items() if k != "path"} for item in manifest.pop("inputs")]
    return {
        "files": {path.name: digest(path.read_bytes()) for path in sorted(done.glob("*.bin"))},
        "manifest": {k: v for k, v in manifest.items() if k not in ("emoe", "tokenizers")} | {"inputs": inputs},
    }


def text(packing: str, jobs: int, folder: Path) -> dict[str, Any]:
    pytest.importorskip("tokenizers")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "train.txt").write_text(lines(900, 1))
    (folder / "valid.txt").write_text(lines(90, 2))
    config = PrepareConfig(length=12, packing=packing, jobs=jobs, split=(0.05, 0.1), slice_bytes=2_000)
    inputs = [folder / "train.txt", folder / "valid.txt"]
    done = prepare(folder / "golden", folder / "vocab.txt", inputs, config=config).path
    domain = TextConfig(path=str(done)).build(0)
    return set_of(done) | of_domain(domain, noise(domain, 60))


def published(folder: Path, root: Path) -> dict[str, Any]:
    """WikiText to train on, the One Billion Words' held-out sentences to test with."""
    train, test = root / "wikitext-2/wiki.valid.tokens.gz", root / "lm1b-small/news.en.heldout-00000-of-00050.gz"
    config = PrepareConfig(length=64, packing="wrap", jobs=2, slice_bytes=1 << 18)
    vocab = root / "tokenizers/bert-base-uncased/vocab.txt"
    return set_of(prepare(folder / "set", vocab, train=[train], test=[test], config=config).path)


def check(case: str, numbers: dict[str, Any]) -> None:
    numbers = json.loads(json.dumps(numbers))
    if MODE == "write":
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        cases = [
            f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted((stored | {case: numbers}).items())
        ]
        STORED.write_text("{\n" + ",\n".join(cases) + "\n}\n")
    wanted = json.loads(STORED.read_text())[case]
    if MODE == "exact":
        assert numbers == wanted
    # Otherwise within rounding: floats went through float32 convolutions or a different math library.
    close = functools.partial(pytest.approx, rel=1e-5 if case.startswith(("digits", "mnist")) else 1e-12)
    assert flat(numbers) == {path: close(x) if isinstance(x, float) else x for path, x in flat(wanted).items()}


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict | list):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {inner: leaf for name, value in items for inner, leaf in flat(value, f"{path}/{name}").items()}


@pytest.mark.parametrize("density", get_args(Density))
def test_toy(density: str) -> None:
    check(f"toy/{density}", toy(density))


@pytest.mark.parametrize("family", ["pairs", "copies", "sums", "permutations", "blocks"])
def test_ties(family: str) -> None:
    check(f"ties/{family}", ties(family))


def test_digits() -> None:
    check("digits", images(DigitsConfig().build(0)))


@pytest.mark.parametrize("side,points", [(32, None), (28, 500)])
def test_mnist(side: int, points: int | None, data_root: DataRoot) -> None:
    root = str(data_root(list(files.ORIGINAL)))
    numbers = images(MNISTConfig(root=root, side=side, points=points).build(0))
    check(f"mnist/{side}", numbers if side == 32 else {k: v for k, v in numbers.items() if k != "measured"})


@pytest.mark.parametrize("ending", [".npy", ".npz", ".csv"])
def test_rows(ending: str, tmp_path: Path) -> None:
    check(f"rows/{ending}", own_rows(ending, tmp_path))


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("packing", ["chunks", "wrap"])
def test_text(packing: str, jobs: int, tmp_path: Path) -> None:
    check(f"text/{packing}", text(packing, jobs, tmp_path))


def test_published_texts(data_root: DataRoot, tmp_path: Path) -> None:
    names = ["wikitext-2/wiki.valid.tokens", "lm1b-small/news.en.heldout-00000-of-00050"]
    check("published", published(tmp_path, data_root([*names, "tokenizers/bert-base-uncased/vocab.txt"])))
