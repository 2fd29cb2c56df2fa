"""`emoe sample`: rows drawn from a trained run, and completions of given rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from emoe.commands import args
from emoe.commands.args import Rows, Seed, Steps
from emoe.config import ConfigError
from emoe.console import meter, tick_calls

if TYPE_CHECKING:
    from emoe.runs.run import Run

PICTURED = 1_000  # rows of real data beside samples in a picture


@args.command("emoe sample")
def sample(
    run: str,
    *,
    n: Rows = 10,
    nfe: Steps | None = None,
    seed: Seed = 0,
    out: str | None = None,
    picture: Path | None = None,
    given: Annotated[tuple[str, ...], args.SEVERAL] = (),
    continue_: Annotated[tuple[str, ...], args.SEVERAL] = (),
    keep: str | None = None,
    ink: Literal["auto", "dark", "light"] = "auto",
    data_root: str | None = None,
    device: str = "auto",
    quiet: bool = False,
    json: bool = False,
    settings: Mapping[str, str],
) -> int:
    """Draw rows from a trained run, or complete given rows.

    Given tokens that are kept stay, all others are drawn. Of a run on text, samples are text, and so is what is given:
    [MASK] is a hole of one token, {5} of five, ___ of all the room that is left in the row; what follows the text is
    drawn too. --method.route-tau 0 makes E-MoE's routes greedy (the ablation).

    Args:
        run: run folder
        n: number of rows, or of completions of each given row
        nfe: network calls; default: the fewest of the recipe's eval.nfe, most often 1
        seed: seed of the draw
        out: write an .npy file instead of printing
        picture: also draw the samples into this .png beside the real data, or the rows they complete
        given: what to complete: .png images of the model's size; or .npy or .csv files, or rows such as 12,? in which
            ?, an empty cell or -1 is wanted (--given=-1,5 where one begins with a minus); or text with holes, or .txt
            files with one such text in a line
        continue_ (TEXT): the same for beginnings, without holes
        keep: what stays of the given rows: positions such as 0-9,20, or none; of images also top-half, bottom-half,
            left-half, right-half, centre, border, or a .png mask (white stays). Default: all tokens that are given
        ink: ink of .png images; auto looks at the border

    Examples:
        emoe sample runs/toy --n 1000 --nfe 2 --out samples.npy --picture samples.png
        emoe sample runs/toy --given 12,? --n 5                       the second token for a first one of 12
        emoe sample runs/rows --given rows.csv --keep 0-3 --nfe 4     positions 0 to 3 stay
        emoe sample runs/digits --given a.png b.png --keep top-half --nfe 16 --n 8 --picture filled.png
        emoe sample runs/news --given 'the minister {3} on friday.' --nfe 16    three tokens, and what follows
        emoe sample runs/news --continue 'the minister said' --nfe 32 --n 3
    """
    if given and continue_:
        raise ConfigError(["continue: is another way of giving rows; give either --given or --continue"])
    source = given or continue_
    if not source and (keep is not None or ink != "auto"):
        name = "ink" if keep is None else "keep"
        raise ConfigError([f"{name}: applies to given rows only; add --given FILE"])
    from emoe.runs.run import check_beginnings, prepare
    from emoe.runs.train import load_run

    opened = load_run(run, device=device, settings=args.with_data_root(settings, data_root))
    nfe = nfe or opened.default_nfe
    outcome: dict[str, Any] = {"nfe": nfe}
    if not source:
        with sampling(opened, n, (nfe,), f"samples of {run}", quiet=quiet):
            samples = opened.sample(n, nfe, seed=seed)
        if picture:
            most = max(n, PICTURED)
            fresh = opened.domain.fresh(min(most, opened.domain.fresh_rows or most), seed)
            opened.domain.picture({"real data": fresh, f"NFE {nfe}": samples}, picture)
    else:
        space = opened.method.space
        rows, masked = prepare(space, opened.experiment.domain, source, keep=keep, ink=ink)
        if continue_:
            check_beginnings(masked, space)
        with sampling(opened, n * len(rows), (nfe,), f"completions by {run}", quiet=quiet):
            completion = opened.complete(rows, n, nfe, seed=seed, keep=masked != space.mask_id)
        samples = completion.pool
        outcome["given"] = masked.where(completion.kept, -1).tolist()
        if picture:
            completion.picture(picture)
    domain = opened.experiment.domain
    if out:
        import numpy as np

        outcome["out"] = out if out.endswith(".npy") else f"{out}.npy"
        np.save(outcome["out"], samples.numpy())
        print(f"{outcome['out']}: {len(samples)} rows, NFE {nfe}", file=sys.stderr)
    elif json:
        outcome |= {"samples": samples.tolist()} | ({"text": domain.write(samples)} if domain.has_words else {})
    else:
        print("\n".join(domain.write(samples)))
    if json:
        print(dumps(outcome))
    return 0


@contextmanager
def sampling(run: Run, rows: int, nfe: Sequence[int], label: str, *, quiet: bool = False) -> Iterator[None]:
    """Progress in network calls that draw `rows` rows for each NFE; a bar after a few seconds."""
    calls = sum(nfe) * -(-rows // run.experiment.eval.batch)
    with meter(calls, label, quiet=quiet) as tick, tick_calls(run.method.backbone, tick):
        yield
