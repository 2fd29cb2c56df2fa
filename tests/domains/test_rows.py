"""Rows from files: reading, refusing with a remedy, splitting, measuring; and the order of batches."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from emoe.config import ConfigError
from emoe.domains.base import DataError, shuffled_batches
from emoe.domains.rows import Rows, RowsConfig

GOOD = np.arange(24).reshape(8, 3) % 5
NUMBERS = np.arange(200).reshape(100, 2)


def build(path: Path, seed: int = 0, **options) -> Rows:
    return RowsConfig(path=str(path), **options).build(seed)


def saved(path: Path, values) -> Path:
    np.save(path, values) if path.suffix == ".npy" else path.write_text(values)
    return path


def all_rows(domain: Rows) -> list[list[int]]:
    return sorted(torch.cat([domain.rows, domain.held_out]).tolist())


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16, np.uint64, np.float32, np.float64])
def test_npy_of_any_number_type(tmp_path, dtype):
    domain = build(saved(tmp_path / "mine.npy", GOOD.astype(dtype)))
    assert (domain.space.size, domain.space.mask_id, domain.space.length) == (6, 5, 3)
    assert domain.task == "rows" and domain.name == "mine"
    assert domain.rows.dtype == torch.long and all_rows(domain) == sorted(GOOD.tolist())
    assert build(saved(tmp_path / "bits.npy", GOOD > 2)).space.size == 3


def test_npz_with_one_array_and_with_a_key(tmp_path):
    np.savez(tmp_path / "one.npz", x=GOOD)
    assert all_rows(build(tmp_path / "one.npz")) == sorted(GOOD.tolist())
    np.savez_compressed(tmp_path / "two.npz", a=GOOD, b=GOOD[:, :2])
    assert build(tmp_path / "two.npz", key="b").space.length == 2
    with pytest.raises(DataError, match=r"holds 2 arrays \(a, b\); choose one with --domain.key"):
        build(tmp_path / "two.npz")
    with pytest.raises(DataError, match="has no array 'c'; --domain.key can be: a, b"):
        build(tmp_path / "two.npz", key="c")
    with pytest.raises(ConfigError, match="key: only .npz files hold named arrays"):
        RowsConfig(path="x.npy", key="a")


DIALECTS = {
    "commas": "0,1,2\n2,1,0\n1,1,1\n",
    "header": "a,b,c\n0,1,2\n2,1,0\n1,1,1",
    "semicolons": "0;1;2\r\n2;1;0\r\n\r\n1;1;1\r\n",
    "spaces": "0 1  2\n2\t1 0\n 1 1 1\n\n",
    "bom and floats": "\ufeff0, 1.0 ,2\n2,1,0\n1,1,1e0\n",
    "quotes": '"0","1","2"\n"2","1","0"\n"1","1","1"\n',
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_csv_in_many_dialects(tmp_path, dialect):
    (tmp_path / "t.csv").write_text(DIALECTS[dialect], encoding="utf-8", newline="")
    domain = build(tmp_path / "t.csv")
    assert all_rows(domain) == [[0, 1, 2], [1, 1, 1], [2, 1, 0]] and domain.space.size == 4


def test_one_column_and_the_largest_number_of_symbols_are_allowed(tmp_path):
    domain = build(saved(tmp_path / "t.csv", "0\n1\n1\n0\n"))
    assert domain.space.length == 1
    assert [m.metric for m in domain.measure(domain.rows)] == ["validity", "overlap"]
    domain = build(saved(tmp_path / "x.npy", np.arange(65_535).reshape(-1, 3)))
    assert (domain.space.size, domain.space.mask_id) == (65_536, 65_535)


BAD_ARRAYS = {
    "one axis": (np.arange(4), r"1 axes \(shape \(4,\)\).*x\[:, None\]"),
    "three axes": (np.zeros((2, 2, 2), int), r"3 axes.*x\.reshape\(len\(x\), -1\)"),
    "no rows": (np.zeros((0, 3), int), r"empty \(shape \(0, 3\)\)"),
    "one row": (np.zeros((1, 3), int), "one row; it needs at least two"),
    "fraction": (np.array([[0, 1.0], [1, 0.5]]), r"row 1, column 1 .*holds 0\.5, not a whole.*np\.digitize"),
    "nan": (np.array([[0, 1.0], [np.nan, 0]]), "row 1, column 0 .*holds nan.*remove such rows"),
    "infinity": (np.array([[0, np.inf], [1, 0]]), "row 0, column 1 .*holds inf"),
    "negative": (np.array([[0, 1], [1, -2]]), "row 1, column 1 .*holds -2, but symbols start at 0.*np.unique"),
    "gap": (np.array([[0, 2], [5, 0]]), r"up to 5, but 1, 3, 4 never occur.*np\.unique\(x, return_inverse=True\)"),
    "huge ids": (np.array([[0, 2**63], [1, 0]], np.uint64), r"but 2, 3, 4, 5, 6 and 9,223,\d\d\d,.* more never"),
    "too many": (np.arange(65_536).reshape(-1, 2), "65,536 different values, at most 65,535"),
    "text": (np.array([["a", "b"], ["c", "d"]]), "holds values of type <U1.*astype"),
    "complex": (np.ones((2, 2), complex), "type complex128"),
}
BAD_TEXTS = {
    "ragged": ("0,1\n\n1,0\n1\n", "line 4 has 1 values, but line 1 has 2"),
    "word": ("0,1\n1,x\n", "line 2, column 2 holds 'x', which is not a number"),
    "empty cell": ("0,1\n,1\n", "line 2, column 1 holds ''"),
    "row names": ("name,1,2\nr1,0,1\n", "line 1, column 1 holds 'name'.*without row names"),
    "negative text": ("a,b\n0,1\n\n\n-1,1\n", r"line 5, column 1 holds -1\.0, but symbols start at 0"),
    "header only": ("a,b\n", "is empty"),
    "one line": ("a,b\n0,1\n", "one row"),
}


@pytest.mark.parametrize("case", [*BAD_ARRAYS, *BAD_TEXTS])
def test_bad_files_are_named_with_a_remedy(tmp_path, case):
    content, message = (BAD_ARRAYS | BAD_TEXTS)[case]
    path = saved(tmp_path / ("bad.csv" if case in BAD_TEXTS else "bad.npy"), content)
    with pytest.raises(DataError, match=re.escape(str(path)) + ".*" + message):
        build(path)


def test_missing_folder_and_foreign_files(tmp_path):
    for name in ("x.parquet", "x.csv"):
        (tmp_path / name).write_bytes(bytes(range(128, 256)))
    for name, message in {
        "no.npy": r"no\.npy: does not exist; --domain\.path takes",
        "": "is a folder",
        "x.parquet": r"cannot read \.parquet files; save the rows as \.npy, \.npz or \.csv",
        "x.csv": "cannot be read as text",
    }.items():
        with pytest.raises(DataError, match=message):
            build(tmp_path / name)


@pytest.mark.parametrize("keep", [0, 60, 150])
@pytest.mark.parametrize("ending", [".npy", ".npz"])
def test_damaged_files(tmp_path, ending, keep):
    path = tmp_path / f"x{ending}"
    (np.save if ending == ".npy" else np.savez_compressed)(path, GOOD)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(DataError, match=f"x{ending}: .*(damaged or cut off|no NumPy file)"):
        build(path)
    path.write_bytes(whole[:200] + bytes(60) + whole[260:])
    if ending == ".npz":
        with pytest.raises(DataError, match="damaged or cut off"):
            build(path)


def test_pickles_are_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    np.save(tmp_path / "x.npy", np.array([[Trap()]], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([[Trap()]], dtype=object))
    (tmp_path / "y.npy").write_text("0,1\n1,0\n")
    for name in ("x.npy", "x.npz", "y.npy"):
        with pytest.raises(DataError, match=f"{name}: holds pickled objects or is no NumPy file"):
            build(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_split_is_a_function_of_the_seed_and_never_empty(tmp_path):
    path = saved(tmp_path / "x.npy", NUMBERS)
    one, again, other = build(path, 1), build(path, 1), build(path, 2)
    assert torch.equal(one.rows, again.rows) and torch.equal(one.held_out, again.held_out)
    assert not torch.equal(one.held_out, other.held_out)
    assert (len(one.rows), len(one.held_out)) == (90, 10)
    assert all_rows(one) == NUMBERS.tolist()  # no row lost, none in both
    assert sorted(one.fresh(30, 0).tolist()) == sorted(3 * one.held_out.tolist())
    assert torch.equal(one.fresh(7, 4), one.fresh(7, 4)) and not torch.equal(one.fresh(10, 4), one.fresh(10, 5))
    two_rows = saved(tmp_path / "two.npy", np.array([[0, 1], [1, 0]]))
    for share in (0.01, 0.9):
        small = build(two_rows, held_out=share)
        assert len(small.rows) == len(small.held_out) == 1
        assert [m.metric for m in small.measure(small.rows)] == ["validity", "overlap", "pair_overlap"]


def test_measures_tell_good_from_bad(tmp_path):
    draw = np.random.default_rng(0)
    x = np.repeat(draw.integers(6, size=(8_000, 2)), 2, axis=1)  # two pairs of equal symbols
    domain = build(saved(tmp_path / "pairs.npy", x), held_out=0.25)
    good = {m.metric: m for m in domain.measure(domain.rows)}
    assert good["validity"].value == 100 and good["overlap"].value > 90 and good["pair_overlap"].value > 92
    assert (good["validity"].n, good["overlap"].n, good["pair_overlap"].n) == (3_000, 2_000, 2_000)
    bad = {m.metric: m for m in domain.measure(torch.from_numpy(draw.integers(6, size=(4_000, 4))))}
    assert bad["validity"].value < 6 and bad["overlap"].value < 10 and bad["pair_overlap"].value < 80


@pytest.mark.parametrize("rows,batch", [(10, 4), (7, 7), (3, 8), (5, 12)])
def test_every_row_comes_equally_often(rows, batch):
    batches, steps = shuffled_batches(torch.arange(rows)[:, None], batch, seed=1), range(3 * rows)
    drawn = torch.cat([batches(step) for step in steps]).flatten()  # 3 * batch whole shuffles
    assert torch.bincount(drawn, minlength=rows).tolist() == [3 * batch] * rows
    shuffles = drawn.reshape(-1, rows)
    assert all(len(set(shuffle.tolist())) == rows for shuffle in shuffles)
    assert len({tuple(shuffle.tolist()) for shuffle in shuffles}) > 1  # each epoch in another order
    backwards = torch.cat([batches(step) for step in reversed(steps)])  # a pure function of the step
    assert torch.equal(backwards.reshape(-1, batch).flip(0).flatten(), drawn)


@pytest.mark.parametrize("rows,batch", [(50, 12), (5, 12)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_slices_of_the_ranks_make_up_the_batch(rows, batch, world):
    table = torch.arange(rows)[:, None]
    whole, other = shuffled_batches(table, batch, seed=2), shuffled_batches(table, batch, seed=3)
    ranks = [shuffled_batches(table, batch, seed=2, rank=rank, world=world) for rank in range(world)]
    for step in (0, 3, 9):
        assert torch.equal(torch.cat([part(step) for part in ranks]), whole(step))
        assert not torch.equal(other(step), whole(step))
    with pytest.raises(ValueError, match="13 rows cannot be split evenly over 2 ranks"):
        shuffled_batches(table, 13, seed=0, world=2)
