"""The handwritten digits that come with scikit-learn (UCI, 8 x 8 pixels)."""

import numpy as np

from dphybrid.data.made import Made


def make_digits(random: np.random.Generator, rows: int) -> Made:
    """Take `rows` of the images in random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = random.permutation(len(found.target))[:rows]
    x_BCHW = (found.images[order, None] / 16).astype(np.float32)
    info = {"num_classes": 10, "image": list(x_BCHW.shape[1:])}
    return (
        {"x_BCHW": x_BCHW, "labels_B": found.target[order].astype(np.int64)},
        info,
        "handwritten digits of 8 x 8 pixels (UCI)",
    )
