"""Prints recommendations by the model in this folder. Needs torch, safetensors and polars (see README.md).

python recommend.py USER [USER ...]
python recommend.py --history ITEM [ITEM ...]
"""

import json
import os
import sys
from pathlib import Path

import polars as pl
import torch
from networks import NETWORKS, Sizes, vectors_of  # type: ignore[import-not-found]
from safetensors import safe_open

HERE = Path(__file__).absolute().parent
# Read by MKL at its first product: without it, bits depend on where inputs lie in memory.
os.environ.setdefault("MKL_CBWR", "AUTO")
BLOCK = 256  # number of users scored at a time


class Model:
    """The exported model. items: names, the most popular one first. Letters: B users of a block, L items of a
    history, V items, D width of a row, E width of a vector (the last column is for the items' biases)."""

    def __init__(self) -> None:
        facts = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
        self.longest, self.excludes_seen = int(facts["network"]["longest"]), bool(facts["exclude_seen"])
        with safe_open(HERE / "vectors.safetensors", "pt") as vectors:
            self.items_VE, self.inputs_VD = vectors.get_tensor("items"), vectors.get_tensor("inputs")
            self.features_UD = vectors.get_tensor("features") if facts["features"] else None
            names = [name for name in vectors.keys() if name.startswith("network.")]  # noqa: SIM118
            weights = {name.removeprefix("network."): vectors.get_tensor(name) for name in names}
        kind = NETWORKS[facts["network"].pop("kind")]
        self.network = kind(Sizes(**facts["network"])).eval()
        self.network.load_state_dict(weights)
        users = pl.read_parquet(HERE / "users.parquet", glob=False)
        self.items = pl.read_parquet(HERE / "items.parquet", glob=False)["name"].to_list()
        self.seen, self.histories = users["seen"], users["history"]
        self.known = users["name"].to_list()
        self.users = {name: number for number, name in enumerate(self.known)}
        self.numbers = {name: number for number, name in enumerate(self.items)}

    def recommend(
        self, users: list[str], k: int = 10, history: list[list[str]] | None = None
    ) -> list[dict[str, object]]:
        """Return user, items and scores for each user: the k best items that the user has not met. history:
        items that each user has met, in order, besides those of training. Users without a known item get the
        most popular items, and None for scores."""
        given = history or [[]] * len(users)
        found: list[dict[str, object]] = []
        for start in range(0, len(users), BLOCK):
            part = slice(start, start + BLOCK)
            found += self._of(users[part], given[part], k)
        return found

    @torch.inference_mode()
    def vectors(self, users: list[str], history: list[list[int]] | None = None) -> torch.Tensor:
        """Return the vectors (users, E) of users; a score is the product with an item's vector. history:
        numbers of items that each user has met, besides those of training."""
        rows = [self.users.get(user, -1) for user in users]
        both = zip(rows, history or [[]] * len(users), strict=True)
        met = [(self.histories[row].to_list() if row >= 0 else []) + new for row, new in both]
        latest = [items[-self.longest :] for items in met]
        rows_BLD = torch.zeros(len(users), max(1, *map(len, latest)), self.inputs_VD.shape[1])
        for place, items in enumerate(latest):
            rows_BLD[place, : len(items)] = self.inputs_VD[items]
        vectors_BD = vectors_of(self.network, rows_BLD, torch.tensor([len(items) for items in latest]))
        if self.features_UD is not None:
            known_B = torch.tensor([row >= 0 for row in rows])
            vectors_BD = vectors_BD + self.features_UD[[max(row, 0) for row in rows]] * known_B.unsqueeze(1)
        return torch.nn.functional.pad(vectors_BD, (0, 1), value=1.0)

    @torch.inference_mode()
    def _of(self, users: list[str], given: list[list[str]], k: int) -> list[dict[str, object]]:
        rows = [self.users.get(user, -1) for user in users]
        more = [[self.numbers[item] for item in items if item in self.numbers] for items in given]
        both = list(zip(rows, more, strict=True))
        seen = [(self.seen[row].to_list() if row >= 0 else []) + new for row, new in both]
        scores_BV = self.vectors(users, more) @ self.items_VE.T
        if self.excludes_seen:
            for place, items in enumerate(seen):
                scores_BV[place, items] = -torch.inf
        scores_BK, items_BK = scores_BV.topk(min(k, len(self.items)))
        popular = self.items[:k]
        return [
            _result(user, [self.items[item] for item in items], scores)
            if row >= 0 or new
            else {"user": user, "items": popular, "scores": None}
            for user, (row, new), items, scores in zip(
                users, both, items_BK.tolist(), scores_BK.tolist(), strict=True
            )
        ]


def _result(user: str, items: list[str], scores: list[float]) -> dict[str, object]:
    # A user may have fewer than k items left.
    unmet = [(item, score) for item, score in zip(items, scores, strict=True) if score > -torch.inf]
    return {"user": user, "items": [item for item, _ in unmet], "scores": [score for _, score in unmet]}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--history":
        print(json.dumps(Model().recommend([""], history=[sys.argv[2:]])))
    else:
        print(json.dumps(Model().recommend(sys.argv[1:])))
