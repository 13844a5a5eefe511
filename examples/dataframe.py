"""From a DataFrame to predictions, in cells like a notebook: run it as a whole, or cell by cell.

python examples/dataframe.py
"""

# %%
import numpy as np
import polars as pl

import dphybrid

# %% a DataFrame of 2,000 visits: a click if the shop is "books" and the price is low, and 3 % by chance

random = np.random.default_rng(0)
shop = random.choice(["books", "music", "tea"], 2000)
price = random.uniform(1, 20, 2000).round(2)
clicked = ((shop == "books") & (price < 12)) | (random.random(2000) < 0.03)
visits = pl.DataFrame({"shop": shop, "price": price, "clicked": clicked.astype(int)})

# %% train; pandas, Arrow, lazy frames, dicts of columns and paths of files work, too
run = dphybrid.train(visits[:1800], label="clicked", devices="cpu*2", epochs=6, batch_size=32)

# %% results on the validation split; a notebook shows run.report() as a page
print(f"{run.name}: AUC {run.metrics['auc']:.3f}")
print(run.splits.select("where", "rows", "steps"))

# %% predictions for new rows; in a later session, get the run by dphybrid.runs()[0] or dphybrid.load("NAME")
new = visits[1800:]
scored = new.with_columns(probability=pl.Series(run.predict(new)))
print(scored.sort("probability", descending=True).head(5))
right = ((scored["probability"] > 0.5) == (scored["clicked"] == 1)).sum() / len(new)
print(f"{right:.1%} of {len(new)} new rows are right")
