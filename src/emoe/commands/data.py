"""`emoe data`: MNIST's files, and text as rows of tokens."""

from __future__ import annotations

import functools
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from emoe.commands import args
from emoe.config import ConfigError, hint
from emoe.console import Tick, meter
from emoe.domains.text import PrepareConfig


def main(words: list[str]) -> int:
    """Fetch data; `emoe data prepare` has options of its own."""
    return int(prepare(words[1:]) if words[:1] == ["prepare"] else fetch(words))


@args.command("emoe data")
def fetch(what: str, *, data_root: str | None = None, quiet: bool = False) -> int:
    """Fetch or prepare data.

    mnist: download the four files of MNIST into DATA-ROOT/mnist, or check those that are there. prepare: turn text into
    rows of tokens, see emoe data prepare --help.

    Args:
        what (mnist|prepare): what to do

    Examples:
        emoe data mnist
        emoe data mnist --data-root ~/data
        emoe data prepare news/ --tokenizer bert/vocab.txt --out sets/news
    """
    if what != "mnist":
        raise ConfigError([f"data: {what!r} is not known{hint(what, ['mnist', 'prepare'])}"])
    from emoe.domains.images import files

    folder, total = files.data_root(data_root), len(files.ORIGINAL)
    paths = files.missing(folder)
    if not paths:
        print(f"{folder}: all {total} files of MNIST are there and checked; nothing to download")
        return 0
    size = sum(files.KNOWN[path.name][0] for path in paths)
    with meter(size, "MNIST (bytes)", quiet=quiet) as tick:
        for path in paths:
            files.download(path, tick)
    print(f"{folder / 'mnist'}: {len(paths)} files downloaded ({size / 1e6:.1f} MB), all {total} checked")
    if data_root:
        print(f"next: emoe train ... --data-root {shlex.quote(data_root)}, or export EMOE_DATA to name it once")
    return 0


@args.command("emoe data prepare")
def prepare(
    inputs: tuple[Path, ...] = (),
    *,
    train: Annotated[tuple[Path, ...], args.SEVERAL] = (),
    valid: Annotated[tuple[Path, ...], args.SEVERAL] = (),
    test: Annotated[tuple[Path, ...], args.SEVERAL] = (),
    out: Path,
    tokenizer: Path,
    config: PrepareConfig,
    quiet: bool = False,
) -> int:
    """Turn text into packed rows of tokens.

    Inputs are text files, also packed (.gz, .xz, .bz2) or in archives (.tar, .tar.gz), or folders of them; one line is
    a sentence or paragraph, empty lines separate documents. Names such as train, valid and test, and those of the One
    Billion Word benchmark, give the split. A run that was stopped continues when it is started again.

    Args:
        inputs: files and folders whose names give the split
        train (FILE): files and folders to train on
        valid (FILE): files and folders to validate with
        test (FILE): files and folders to test with
        out: the folder to write
        tokenizer: BERT's vocab.txt or tokenizer.json, or its folder

    Examples:
        emoe data prepare news/ --tokenizer bert/vocab.txt --out sets/news
        emoe data prepare book.txt --split 0.01,0.01 --tokenizer bert --out sets/book
        emoe data prepare 1-billion-word-language-modeling-benchmark-r13output.tar.gz --tokenizer bert \
--packing wrap --out sets/lm1b
        emoe data prepare --train a.txt.gz b.txt.xz --test c.txt --tokenizer bert --out sets/mine
    """
    from emoe.domains.text import prepare as text

    with ExitStack() as stack:
        tick: Tick | None = None

        def show(size: int, total: int) -> None:
            nonlocal tick
            tick = tick or stack.enter_context(meter(total, f"{out} (bytes of files)", quiet=quiet))
            tick(size, "")

        named = {"train": train, "valid": valid, "test": test}
        note = functools.partial(print, "emoe data:", file=sys.stderr)
        done = text.prepare(out, tokenizer, inputs, **named, config=config, on_progress=show, note=note)
    length = done.manifest["length"]
    for name, rows in done.manifest["splits"].items():
        print(
            f"{name}: {rows['rows']:,} rows of {length} tokens, {rows['documents']:,} documents, "
            f"{100 * rows['unknown_share']:.3f}% of the tokens unknown"
        )
    work = f"{done.made} parts made, {done.kept} kept" if done.made + done.kept else "is there already, nothing to do"
    print(f"{done.path}: {work}; train on it with --domain text --domain.path {shlex.quote(str(done.path))}")
    return 0
