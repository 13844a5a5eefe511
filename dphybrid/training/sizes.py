"""How long to train and in which batches, where the config leaves it to the data."""

import math

from dphybrid.config import ExperimentConfig

_SMALLEST = 32
STEPS, _FEWEST, _MOST = 4000, 10, 200


def sized(
    config: ExperimentConfig, num_rows: int, batches: int, largest: int
) -> tuple[ExperimentConfig, list[str]]:
    """Return the config with batch size, epochs and patience for so many training rows, where they were 0 (or
    -1), and a line for people about each.

    As many batches an epoch as `batches` says, rounded to a power of two within 32 and `largest`; epochs for
    4,000 steps, within 10 and 200; patience of a tenth of the epochs, 3 or more.
    """
    train, lines = config.train, []
    batch_size, epochs, patience = train.batch_size, train.epochs, train.patience
    if not batch_size:
        wanted = 2 ** round(math.log2(max(1.0, num_rows / batches)))
        batch_size = min(max(wanted, _SMALLEST), largest)
        lines.append(
            f"train.batch_size={batch_size}: {num_rows:,} training rows / {batches}, rounded to a power of "
            f"two, within {_SMALLEST} and {largest}"
        )
    steps = math.ceil(num_rows / batch_size)
    if not epochs:
        epochs = min(max(round(STEPS / steps), _FEWEST), _MOST)
        lines.append(
            f"train.epochs={epochs}: {STEPS:,} steps / {steps:,} an epoch, within {_FEWEST} and {_MOST}"
        )
    if patience < 0:
        patience = max(3, epochs // 10)
        lines.append(f"train.patience={patience}: a tenth of the epochs, 3 or more")
    if not lines:
        return config, lines
    found = {"batch_size": batch_size, "epochs": epochs, "patience": patience}
    return config.model_copy(update={"train": train.model_copy(update=found)}), lines
