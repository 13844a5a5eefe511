"""Writes a made-up table for first steps: visits of a shop's pages, with what real tables have - ids, dates,
lists, prices, quoted texts, missing values - and a label that depends on several of them.

python examples/visits.py    # visits.csv, visits-new.csv (later rows without the label), visits-answers.csv

Letters: B rows, U users, C cities.
"""

import numpy as np
import polars as pl

_CITIES = ("Lyon, FR", "Zürich", 'the "Old" Town', "Oslo", "Porto", "Gdańsk", "Kyoto", "Lima")
_TAGS = ("new", "old", "red", "blue", "sale", "gift")
_DEVICES = ("phone", "laptop", "tablet")
_NOTES = ('says "maybe"', "asked for a refund, twice", "first visit", "came back", "None of it", "")
_USERS = 1500


def visits(num_rows: int, seed: int) -> pl.DataFrame:
    """Return rows in the order of time, as texts with None for no value. `clicked` is the label: "yes" for
    about a quarter of the rows. It depends on the user, the tags, the price beside what the user usually
    pays, and on columns together: what is on sale attracts on phones and repels on laptops, and some cities
    are awake in the evening, others in the morning."""
    random = np.random.default_rng([seed, 20])
    # A few users come often, most of them rarely.
    chance_U = (1 + random.permutation(_USERS)) ** -0.6
    user_B = random.choice(_USERS, num_rows, p=chance_U / chance_U.sum())
    likes_U, usual_U = random.normal(0, 0.8, _USERS), random.lognormal(3.0, 0.5, _USERS)
    city_B = random.integers(0, len(_CITIES), num_rows)
    of_city_C = random.normal(0, 0.4, len(_CITIES))
    price_B = usual_U[user_B] * random.lognormal(0, 0.6, num_rows)
    has_tag = random.random((num_rows, len(_TAGS))) < (0.3, 0.3, 0.2, 0.2, 0.15, 0.05)
    minute_B = np.sort(random.integers(0, 60 * 24 * 60, num_rows))
    hour_B = minute_B // 60 % 24
    device_B = random.choice(len(_DEVICES), num_rows, p=(0.6, 0.3, 0.1))
    score_B = (
        likes_U[user_B]
        + of_city_C[city_B]
        - 0.9 * np.log(price_B / usual_U[user_B])
        + has_tag @ np.array([0.9, -0.4, 0.0, 0.0, 0.0, 0.4])
        + has_tag[:, 4] * np.array([1.6, -1.2, 0.4])[device_B]
        + 1.2 * np.where(city_B % 2 == 0, hour_B >= 16, hour_B < 8)
        - 2.2
    )
    clicked_B = random.random(num_rows) < 1 / (1 + np.exp(-score_B))
    start = np.datetime64("2026-08-01T00:00")
    times = (start + minute_B.astype("timedelta64[m]")).astype(str)
    texts = {
        "time": [time.replace("T", " ") for time in times.tolist()],
        "user": [f"u{number:04d}" for number in user_B],
        "city": [_CITIES[number] for number in city_B],
        "device": [_DEVICES[number] for number in device_B],
        "tags": ["|".join(tag for tag, has in zip(_TAGS, row, strict=True) if has) for row in has_tag],
        "price": [f"{price:.2f}" for price in price_B],
        "note": random.choice(_NOTES, num_rows).tolist(),
        "clicked": np.where(clicked_B, "yes", "no").tolist(),
    }
    frame = pl.DataFrame(texts).with_columns(pl.col("tags", "note").replace("", None))
    for name, share in (("city", 0.03), ("device", 0.02), ("price", 0.05)):
        keep_B = pl.Series(random.random(num_rows) >= share)
        frame = frame.with_columns(pl.when(keep_B).then(name))
    return frame


def write(num_rows: int = 20_000, num_new: int = 2_000) -> None:
    """Write the three files into the working folder."""
    rows = visits(num_rows + num_new, seed=0)
    later = rows.tail(num_new)
    rows.head(num_rows).write_csv("visits.csv")
    later.drop("clicked").write_csv("visits-new.csv")
    later.write_csv("visits-answers.csv")


if __name__ == "__main__":
    write()
