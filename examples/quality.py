"""How good the models are: beside scikit-learn's trees, published figures and a plain PyTorch loop, as
tables and as JSON.

    python examples/quality.py --data FOLDER [--only adult] [--seeds 2] [--out quality.json]

FOLDER holds what a part reads: adult/adult.data (UCI Adult) and wn18rr/ (train.txt, valid.txt, test.txt);
text is the reference that ships with Python. `--table FILE --label NAME` compares on a table of your own
instead of Adult. Everything runs on the CPU, in a data folder of its own; nothing is recorded. The JSON file
is written anew after each seed, training or turn, so that an interrupted script leaves what it has finished.

- adult: recipe ctr and HistGradientBoostingClassifier, trained on the same rows and asked about the same
  others, for each seed. No choice is made on the rows asked about: ctr sets validation rows of its own aside.
- wn18rr: recipe kge with each of `KGE`, filtered ranks among all entities, beside figures that others have
  published.
- text: steps of recipe text and of the same LSTM in a plain loop, on the same batches, in turns, by CPU time.

Letters: B samples, T tokens of a sample, H width of the network.
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dphybrid
from dphybrid.config.settings import load_settings
from dphybrid.config.tables import TableDataConfig
from dphybrid.data import Prepared, batches
from dphybrid.data.table.encoder import Encoder
from dphybrid.data.table.kinds import Numeric
from dphybrid.data.table.rows import read_rows
from dphybrid.embedding import DeclaresIds, RowPipeline, clip_grad_norm_, find_tables, make_row_optimizer
from dphybrid.parallel import resolve_devices
from dphybrid.recipes import build_from_config, find_recipe
from dphybrid.recipes.configs import load_config
from dphybrid.recipes.text.model import IGNORED
from dphybrid.training.optimizers import make_dense_optimizer
from dphybrid.util.errors import UserError
from dphybrid.util.files import given_path, write_json

Page = dict[str, Any]
Keep = Callable[[Page], None]
"""What a part hands its figures to whenever there are more of them."""

CTR: dict[str, Page] = {
    "ctr, as it comes": {},
    "ctr, Wide & Deep": {"kind": "wide-deep"},
}
"""Values over the recipe's own."""
KGE: dict[str, Page] = {
    "kge, as it comes": {},
    "kge, best known": {"penalty": 0.2, "batch_size": 256, "epochs": 36, "table__lr": 0.5},
}
"""Values over the recipe's own. The last ones were chosen on WN18RR's validation part."""
TREES = "HistGradientBoosting"
MOST_CODES = 254
"""Frequent values of a column that trees see each; scikit-learn takes 255 codes, and the rest share one."""
PUBLISHED = {"ComplEx": 0.475, "RESCAL": 0.467, "DistMult": 0.452, "ConvE": 0.442, "TransE": 0.228}
"""Filtered MRR on WN18RR's test part, from the README of LibKGE (github.com/uma-pi1/kge; Ruffinelli,
Broscheit and Gemulla 2020), each after a search for its best values."""
STEPS, WARM_UP = 12, 1
"""Steps of a turn, and turns that are not counted."""


@contextlib.contextmanager
def taking(times: Page) -> Iterator[None]:
    """Put the seconds of the block, on the clock and of all threads, into `times`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def adult(table: Path, label: str, seeds: range, keep: Keep) -> None:
    """Train each of `CTR` and the trees on the same rows, for each seed. Raises UserError for a table that
    the trees cannot be given."""
    if not installed("scikit-learn"):
        raise UserError(
            "scikit-learn is not installed, and this part compares with it: python -m pip install "
            "scikit-learn, or --only text"
        )
    found: dict[str, list[Page]] = {name: [] for name in [TREES, *CTR]}
    for done, seed in enumerate(seeds, start=1):
        data = TableDataConfig(path=str(table), label=label)
        prepared = find_recipe("ctr").prepare(data, load_settings().prepared_dir, seed)
        if prepared.info.get("label", {}).get("task", "binary") != "binary":
            raise UserError(f"--label {label}: has not two values, and the comparison is by AUC")
        found[TREES].append(trees(table, data, prepared, seed))
        tell(f"adult, seed {seed}: {TREES} {found[TREES][-1]['auc']:.4f}")
        for name, values in CTR.items():
            found[name].append(clicks(table, data, prepared, seed, values))
            tell(
                f"adult, seed {seed}: {name} {found[name][-1]['auc']:.4f}, {found[name][-1]['wall_s']:.1f} s"
            )
        sizes = {name: prepared.manifest.split[name] for name in ("train_rows", "valid_rows")}
        keep({"table": table.name, "seeds": list(seeds)[:done], **sizes, "runs": found})


def clicks(table: Path, data: TableDataConfig, prepared: Prepared, seed: int, values: Page) -> Page:
    """Train recipe ctr on the rows that a prepared folder trains on, of which it sets its own validation rows
    aside, and ask it about the folder's validation rows."""
    from sklearn.metrics import roc_auc_score

    label = Encoder.load(prepared.path / "encoder").label.name
    rows, arrays, times = read_rows(table, data), prepared.arrays, Page()
    frame = pl.DataFrame({name: rows.column(name) for name in rows.names})
    with tempfile.TemporaryDirectory(prefix="dphybrid-quality-") as folder, taking(times):
        file = Path(folder) / "train.csv"
        frame[arrays["train_rows"]].write_csv(file)
        run = dphybrid.train(
            str(file),
            recipe="ctr",
            label=label,
            header="yes",
            devices="cpu",
            tracking="none",
            quiet=True,
            seed=seed,
            **values,
        )
        asked = frame[arrays["valid_rows"]].drop(label)
        scores_B = dphybrid.load(str(run.folder), devices="cpu").predict(asked)
    return {"auc": float(roc_auc_score(arrays["labels_B"][arrays["valid_rows"]], scores_B)), **times}


def trees(table: Path, data: TableDataConfig, prepared: Prepared, seed: int) -> Page:
    """Train scikit-learn's trees, with their own defaults, on the rows that a prepared folder trains on."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score

    encoder = Encoder.load(prepared.path / "encoder")
    rows, arrays = read_rows(table, data), prepared.arrays
    train_rows, valid_rows = arrays["train_rows"], arrays["valid_rows"]
    labels_B = (rows.column(encoder.label.name) == encoder.classes[1]).to_numpy()
    same = len(labels_B) == len(arrays["labels_B"]) and bool((labels_B == arrays["labels_B"]).all())
    if encoder.bags or not all(isinstance(c, Numeric) for c in encoder.numbers) or not same:
        raise UserError(
            f"{table}: has bags, dates, or rows that cannot be read or have no label; give a table of "
            "numbers and categories in which every row counts"
        )
    columns = [c.read(rows.column(c.name)).to_numpy() for c in encoder.numbers]
    columns += [codes(rows.column(c.name), train_rows) for c in encoder.categories]
    cells_BF = np.stack(columns, 1)
    times: Page = {}
    categorical = list(range(len(encoder.numbers), len(columns)))
    with taking(times):
        model = HistGradientBoostingClassifier(categorical_features=categorical, random_state=seed)
        model.fit(cells_BF[train_rows], labels_B[train_rows])
        scores_B = model.predict_proba(cells_BF[valid_rows])[:, 1]
    return {"auc": float(roc_auc_score(labels_B[valid_rows], scores_B)), **times}


def codes(texts: pl.Series, train_rows: np.ndarray) -> np.ndarray:
    """Return texts as numbers by their frequency in the training rows, nan for no value."""
    counted = texts.gather(train_rows).drop_nulls().value_counts(sort=True, name="rows")
    common = counted[texts.name].head(MOST_CODES)
    numbers = range(len(common))
    coded = texts.replace_strict(common, pl.Series(numbers), default=len(common), return_dtype=pl.Float64)
    return coded.set(texts.is_null(), None).fill_null(float("nan")).to_numpy()


def wn18rr(folder: Path, epochs: int | None, keep: Keep) -> None:
    """Train each of `KGE`, for as many epochs as it says or for `epochs`."""
    found: dict[str, Page] = {}
    for name, values in KGE.items():
        times: Page = {}
        given = values if epochs is None else values | {"epochs": epochs}
        tell(f"wn18rr: {name}; several minutes on one core")
        with taking(times):
            run = dphybrid.train(
                str(folder), recipe="kge", devices="cpu", tracking="none", quiet=True, **given
            )
        mrr = {part: run.metrics[metric] for part, metric in (("valid", "mrr"), ("test", "test_mrr"))}
        found[name] = {"values": given, "epochs": run.config.train.epochs, "mrr": mrr, **times}
        tell(f"wn18rr: {name} {mrr['test']:.4f}, {times['wall_s']:.0f} s")
        keep({"runs": found, "published_test_mrr": PUBLISHED})


class PlainText(nn.Module):
    """The text recipe's network in plain PyTorch, the table a parameter like the others."""

    def __init__(self, num_words: int, dim: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(num_words, dim), nn.Dropout(dropout)
        self.network = nn.LSTM(dim, hidden, layers, batch_first=True, dropout=dropout)
        self.output = nn.Linear(hidden, num_words)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden_BTH = self.dropout(self.network(self.dropout(self.words(batch["ids_BT"])))[0])
        return cross_entropy(
            self.output(hidden_BTH).flatten(0, 1), batch["targets_BT"].flatten(), ignore_index=IGNORED
        )


def text(turns: int, keep: Keep) -> None:
    """Time `STEPS` steps at a time of recipe text, with its own values, and of the same network in a plain
    loop."""
    config = load_config(None, ["recipe=text", "devices=cpu"])
    tell("text: preparing")
    with contextlib.redirect_stdout(sys.stderr):
        data = find_recipe("text").prepare(config.data, load_settings().prepared_dir, 0)
    model = build_from_config(config, data.info, resolve_devices("cpu"))
    tables, dense = find_tables(model), make_dense_optimizer(model, config.train)
    rows = make_row_optimizer(config.table.optimizer, tables, lr=config.table.lr)
    assert dense is not None
    assert isinstance(model, DeclaresIds)
    o = config.model.model_dump()
    plain = PlainText(data.info["num_words"], o["dim"], o["hidden"], o["layers"], o["dropout"])
    adam = torch.optim.Adam(plain.parameters(), lr=config.train.lr)

    def hybrid_steps(drawn: list[dict[str, Tensor]]) -> None:
        with RowPipeline(model) as pipeline:
            for batch in pipeline.prefetch(drawn, model.table_ids):
                dense.zero_grad()
                rows.zero_grad()
                outputs = model(batch)
                (outputs["loss"].sum() / outputs["weight"].sum()).backward()
                clip_grad_norm_(model.parameters(), config.train.clip_norm)
                dense.step()
                rows.step()

    def plain_steps(drawn: list[dict[str, Tensor]]) -> None:
        for batch in drawn:
            adam.zero_grad()
            plain(batch).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), config.train.clip_norm)
            adam.step()

    source = batches(data.dataset("train"), config.train.batch_size, seed=0, epoch=0, shuffle=True)
    drawn = list(islice(source, STEPS))
    tokens = sum(int((batch["targets_BT"] != IGNORED).sum()) for batch in drawn)
    both: dict[str, Callable[[list[dict[str, Tensor]]], None]] = {
        "text": hybrid_steps,
        "plain": plain_steps,
    }
    speeds: dict[str, list[float]] = {name: [] for name in both}
    for turn in range(WARM_UP + turns):
        for name, steps in both.items():
            times: Page = {}
            with taking(times):
                steps(drawn)
            if turn >= WARM_UP:
                speeds[name].append(tokens / times["cpu_s"])
        tell(f"text: turn {turn + 1} of {WARM_UP + turns}")
        ratios = [ours / other for ours, other in zip(*speeds.values(), strict=True)]
        if ratios:
            keep({"tokens_per_turn": tokens, "tokens_per_cpu_s": speeds, "ratios": ratios})


def lines(found: Page) -> list[str]:
    """Return the figures as Markdown for people."""
    told = [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    if part := found.get("adult"):
        trees_auc = [run["auc"] for run in part["runs"][TREES]]
        told += [
            "",
            f"{part['table']}: {part['train_rows']:,} rows to train, {part['valid_rows']:,} to validate, "
            f"seeds {', '.join(map(str, part['seeds']))}",
            "",
            "| model | AUC | lowest to highest | beside the trees | seconds | of CPU |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, runs in part["runs"].items():
            auc = [run["auc"] for run in runs]
            wall_s, cpu_s = (statistics.median(run[key] for run in runs) for key in ("wall_s", "cpu_s"))
            gaps = [one - other for one, other in zip(auc, trees_auc, strict=True)]
            beside = f"{statistics.mean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})"
            told.append(
                f"| {name} | {statistics.mean(auc):.4f} | {min(auc):.4f} to {max(auc):.4f} | "
                f"{beside if name != TREES else ''} | {wall_s:.1f} | {cpu_s:.1f} |"
            )
    if part := found.get("wn18rr"):
        told += [
            "",
            "| WN18RR | filtered MRR, test part | validation | seconds | of CPU |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {name}, {run['epochs']} epochs | {run['mrr']['test']:.3f} | {run['mrr']['valid']:.3f} | "
                f"{run['wall_s']:.0f} | {run['cpu_s']:.0f} |"
                for name, run in part["runs"].items()
            ),
            *(f"| {name}, published (LibKGE) | {mrr:.3f} | | | |" for name, mrr in PUBLISHED.items()),
        ]
    if part := found.get("text"):
        told += ["", "| LSTM | tokens a second of CPU | |", "| --- | --- | --- |"]
        for name, speeds in part["tokens_per_cpu_s"].items():
            told.append(
                f"| {name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} |"
            )
        low, middle, high = np.quantile(part["ratios"], [0, 0.5, 1])
        told.append(f"| text over plain, by turn | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return told


def installed(name: str) -> str:
    """Return a package's version, "" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def machine() -> Page:
    """Return what the figures depend on."""
    versions = {name: installed(name) for name in ("torch", "scikit-learn")}
    python = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    return (
        {"date": str(date.today()), "CPU": f"{os.cpu_count()} cores {platform.machine()}"} | versions | python
    )


def main(argv: list[str] | None = None) -> Page:
    """Measure what was asked for, print it, write it, and return it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder with adult/ and wn18rr/")
    parser.add_argument("--only", choices=("adult", "wn18rr", "text"), help="one part; else all")
    parser.add_argument("--seeds", type=int, default=5, help="how many, of adult (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--table", type=Path, help="a table to take for Adult")
    parser.add_argument("--label", default="14", help="its label: a name, or a position (14)")
    parser.add_argument("--epochs", type=int, help="of wn18rr, instead of each training's own")
    parser.add_argument("--turns", type=int, default=5, help="of text (5)")
    parser.add_argument("--out", type=Path, default=Path("quality.json"), help="the JSON file")
    given = parser.parse_args(argv)
    parts = [given.only] if given.only else ["adult", "wn18rr", "text"]
    found: Page = {"machine": machine()}

    def keeper(name: str) -> Keep:
        def keep(part: Page) -> None:
            found[name] = part
            write_json(given.out, found)

        return keep

    with tempfile.TemporaryDirectory(prefix="dphybrid-quality-") as folder:
        os.environ["DPHYBRID_DATA_DIR"] = folder
        if "adult" in parts:
            table = given_path(str(given.table or there(given.data, "adult/adult.data")), "--table")
            seeds = range(given.first_seed, given.first_seed + given.seeds)
            adult(table, given.label, seeds, keeper("adult"))
        if "wn18rr" in parts:
            wn18rr(there(given.data, "wn18rr"), given.epochs, keeper("wn18rr"))
        if "text" in parts:
            text(given.turns, keeper("text"))
    print("\n".join(lines(found)))
    tell(f"wrote {given.out}")
    return found


def there(data: Path | None, name: str) -> Path:
    """Return what a part reads. Raises UserError when it is not there."""
    if data is None or not (data / name).exists():
        raise UserError(f"--data {data}: there is no {name}; name the folder that holds it, or --only text")
    return data / name


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"quality: {error}")
