"""From a polars DataFrame to predictions, in the manner of a notebook: run it as a whole, or cell by cell.

python examples/dataframe.py
"""

# %%
import os
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

import dphybrid
from dphybrid.config.settings import load_settings
from dphybrid.jobs.train import run_job
from dphybrid.recipes.configs import load_config

# %% a DataFrame: 2,000 visits, clicked when the shop is the bookseller and the price is low, or by chance

random = np.random.default_rng(0)
shop = random.choice(["books", "music", "tea"], 2000)
price = random.uniform(1, 20, 2000).round(2)
clicked = ((shop == "books") & (price < 12)) | (random.random(2000) < 0.03)
visits = pl.DataFrame({"shop": shop, "price": price, "clicked": clicked.astype(int)})

# %% as a file, for a training reads files, in chunks, of any size; CSV works as well
folder = Path(tempfile.mkdtemp())
visits[:1800].write_parquet(folder / "visits.parquet")

# %% train
os.environ.setdefault("DPHYBRID_DATA_DIR", str(folder / "data"))
values = {
    "recipe": "ctr",
    "devices": "cpu*2",
    "data.path": folder / "visits.parquet",
    "data.label": "clicked",
    "train.epochs": 6,
    "train.batch_size": 32,
}
report = run_job(load_config(None, [f"{name}={value}" for name, value in values.items()]), load_settings())

# %% what came out, on the validation split
print(f"{report.run_name}: AUC {report.metrics['auc']:.3f}")

# %% predictions for rows that were never seen
new = visits[1800:]
predictor = dphybrid.load(report.run_name)
scored = new.with_columns(probability=pl.Series(predictor.predict(new)))
print(scored.sort("probability", descending=True).head(5))
right = ((scored["probability"] > 0.5) == (scored["clicked"] == 1)).sum() / len(new)
print(f"{right:.1%} of {len(new)} new rows are right")
