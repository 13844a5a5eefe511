"""Prints recommendations by the model in this folder. Needs torch, safetensors and polars (see README.md).

python recommend.py USER [USER ...]
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import safe_open

HERE = Path(__file__).absolute().parent
# Read by MKL at its first product: without it, bits depend on where inputs lie in memory.
os.environ.setdefault("MKL_CBWR", "AUTO")
SCORES = 2**24  # maximum number of scores in memory


class Model:
    """The exported model. users_UE, items_VE: vectors, mapped into memory. items: names, the most popular one
    first. Letters: B users of a block, U all known users, V items, E width of a vector, K items of a list."""

    def __init__(self) -> None:
        with safe_open(HERE / "vectors.safetensors", "pt") as vectors:
            self.users_UE, self.items_VE = vectors.get_tensor("users"), vectors.get_tensor("items")
        users = pl.read_parquet(HERE / "users.parquet", glob=False)
        self.items = pl.read_parquet(HERE / "items.parquet", glob=False)["name"].to_list()
        self.seen: pl.Series = users["seen"]
        self.known = users["name"].to_list()
        self.numbers = {name: number for number, name in enumerate(users["name"])}

    def vectors(self, users: list[str]) -> torch.Tensor:
        """Return the vectors (users, E) of known users; a score is the product with an item's vector."""
        return self.users_UE[[self.numbers[user] for user in users]]

    @torch.inference_mode()
    def recommend(self, users: list[str], k: int = 10) -> list[dict[str, object]]:
        """Return user, items and scores for each user: the k best items that the user has not met. Unknown
        users get the most popular items, and None for scores."""
        known = [user for user in dict.fromkeys(users) if user in self.numbers]
        best: dict[str, tuple[list[int], list[float]]] = {}
        step = max(1, SCORES // len(self.items))
        for start in range(0, len(known), step):
            part = known[start : start + step]
            rows = [self.numbers[user] for user in part]
            scores_BV = self.users_UE[rows] @ self.items_VE.T
            for place, row in enumerate(rows):
                scores_BV[place, self.seen[row].to_list()] = -torch.inf
            scores_BK, items_BK = scores_BV.topk(min(k, len(self.items)))
            best |= dict(zip(part, zip(items_BK.tolist(), scores_BK.tolist(), strict=True), strict=True))
        # Items are sorted by popularity: the first k are the most popular.
        popular = range(min(k, len(self.items))), None
        return [self._result(user, *best.get(user, popular)) for user in users]

    def _result(self, user: str, items: Any, scores: list[float] | None) -> dict[str, object]:
        if scores is None:
            return {"user": user, "items": [self.items[item] for item in items], "scores": None}
        # A user may have fewer than k items left.
        unmet = [(self.items[i], s) for i, s in zip(items, scores, strict=True) if s > -torch.inf]
        return {"user": user, "items": [i for i, _ in unmet], "scores": [s for _, s in unmet]}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(json.dumps(Model().recommend(sys.argv[1:])))
