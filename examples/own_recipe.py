"""Your own recipe: config, data, model and task in one class. Run it by its import path:

dphybrid train --recipe examples.own_recipe:Ratings --data.num-ratings 5000 --devices 'cpu*2'
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dphybrid.parallel import DataParallel
from dphybrid.recipes import DataConfig, ModelConfig, ModelContext, Recipe, Task


# [start:ratings]
class RatingsData(DataConfig):
    num_ratings: int = Field(default=4000, ge=100)
    """Made-up ratings of 50 users for 40 films."""


class Net(torch.nn.Module):
    def __init__(self, context: ModelContext[ModelConfig]) -> None:
        super().__init__()
        num_users, num_films = (context.info["num_ids"][name] for name in ("user", "film"))
        self.users = context.table(num_users, 8, name="users")
        self.films = context.table(num_films, 8, name="films")
        self.region = DataParallel(torch.nn.Bilinear(8, 8, 1), context.devices)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        # A batch has the names that `rows` gives its arrays.
        stars_B = self.region(self.users(batch["user"]), self.films(batch["film"])).squeeze(1)
        loss_B = (stars_B - batch["stars"].to(stars_B)).square()
        return {"loss": loss_B, "weight": torch.ones_like(loss_B), "said": stars_B}


def share_right(outputs: dict[str, Tensor]) -> dict[str, float]:
    return {"right": float((outputs["said"].sign() == outputs["stars"].sign()).double().mean())}


class Ratings(Recipe):
    name = "ratings"
    summary = "Stars that users give to films."
    data = RatingsData
    train = {"epochs": 3, "batch_size": 64, "lr": 0.02}

    def rows(self, data: RatingsData, seed: int) -> tuple[Any, Any]:
        random = np.random.default_rng(seed)
        user, film = random.integers(0, 50, data.num_ratings), random.integers(0, 40, data.num_ratings)
        # A rule to learn: 1 star if both numbers are even or both odd, else -1.
        columns = {"user": user, "film": film, "stars": np.where((user + film) % 2 == 0, 1.0, -1.0)}
        cut = data.num_ratings * 9 // 10
        return {k: v[:cut] for k, v in columns.items()}, {k: v[cut:] for k, v in columns.items()}

    def build(self, context: ModelContext[ModelConfig]) -> torch.nn.Module:
        return Net(context)

    def task(self, info: Mapping[str, Any]) -> Task:
        return Task("right", higher_is_better=True, compute=share_right, reads=("said", "stars"))


# [end:ratings]
