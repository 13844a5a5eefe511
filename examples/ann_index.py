"""Builds an approximate index (FAISS, HNSW) over the items of an exported retrieval model, and measures its
recall.

dphybrid export RUN --out towers
python examples/ann_index.py towers        # writes towers/items.faiss

Letters: U users, V items, E width of a vector, K items of a list.
"""

import sys
import time
from pathlib import Path

import faiss
import numpy as np

K = 10


def main(folder: Path) -> None:
    # recommend.py is part of the exported folder.
    sys.path.insert(0, str(folder))
    from recommend import Model  # type: ignore[import-not-found]

    model = Model()
    items_VE, users_UE = model.items_VE.numpy(), model.vectors(model.known[:1000]).numpy()
    # The inner product, because scores are dot products; faiss compares by distance unless told otherwise.
    index = faiss.IndexHNSWFlat(items_VE.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 200
    index.add(items_VE)
    exact_UK = np.argsort(-(users_UE @ items_VE.T), axis=1, kind="stable")[:, :K]
    # A wider search finds more of the exact result and takes longer.
    for width in (16, 64, 256):
        index.hnsw.efSearch = width
        began = time.perf_counter()
        _, found_UK = index.search(users_UE, K)
        took_ms = 1000 * (time.perf_counter() - began) / len(users_UE)
        pairs = zip(exact_UK, found_UK, strict=True)
        recall = np.mean([len(set(exact) & set(found)) / K for exact, found in pairs])
        print(f"efSearch {width}: recall@{K} {recall:.3f} of the exact search, {took_ms:.3f} ms per user")
    faiss.write_index(index, str(folder / "items.faiss"))
    # The index does not know which items a user has met. To leave those of user u out, ask for
    # K + len(model.seen[u]) items and drop the ones in model.seen[u], the numbers of the items.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
