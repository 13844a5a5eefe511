"""Data that needs no files: random rows with a planted answer for the tutorials' models."""

import numpy as np

from dphybrid.data.made import Made, Maker


def linear(inputs: int, outputs: int) -> Maker:
    """Return a maker of rows whose answers are a linear map of their features, and noise."""

    def make(random: np.random.Generator, rows: int) -> Made:
        x_BI = random.standard_normal((rows, inputs), dtype=np.float32)
        planted_IO = random.standard_normal((inputs, outputs), dtype=np.float32)
        noise_BO = 0.1 * random.standard_normal((rows, outputs), dtype=np.float32)
        info = {"num_inputs": inputs, "num_outputs": outputs}
        return (
            {"x_BI": x_BI, "y_BO": x_BI @ planted_IO + noise_BO},
            info,
            f"random rows of {inputs} features, {outputs} answers",
        )

    return make


def rows_of_table(random: np.random.Generator, rows: int) -> Made:
    """Make ids whose answers are rows of a planted table, and noise."""
    num_ids, width = 1000, 10
    ids_B = random.integers(0, num_ids, rows, dtype=np.int64)
    planted_VO = random.standard_normal((num_ids, width), dtype=np.float32)
    noise_BO = 0.1 * random.standard_normal((rows, width), dtype=np.float32)
    info = {"num_ids": num_ids, "num_outputs": width}
    return (
        {"ids_B": ids_B, "y_BO": planted_VO[ids_B] + noise_BO},
        info,
        f"random ids below {num_ids}, {width} answers",
    )


def images(random: np.random.Generator, rows: int) -> Made:
    """Make noisy pictures of planted classes."""
    classes, side = 10, 32
    labels_B = random.integers(0, classes, rows, dtype=np.int64)
    planted = random.standard_normal((classes, 3, side, side), dtype=np.float32)
    x_BCHW = 0.5 * planted[labels_B] + random.standard_normal((rows, 3, side, side), dtype=np.float32)
    return (
        {"x_BCHW": x_BCHW, "labels_B": labels_B},
        {"num_classes": classes},
        f"noisy images of {classes} classes",
    )
