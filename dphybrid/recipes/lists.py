"""Lists of different lengths as tensors. Letters: B rows, L items of a list."""

import numpy as np
import torch
from torch import Tensor

from dphybrid.data.batches import Array


def lists_of(items: Array, starts_B: Array, stops_B: Array, none: int) -> Tensor:
    """Return (B, longest) int64: the items of each row, items[start:stop], padded with `none`."""
    # One gather instead of a loop over rows: positions behind a row's items read other rows' items, and are
    # replaced below.
    within_BL = starts_B[:, None] + np.arange(max(1, int((stops_B - starts_B).max(initial=0))))
    some = items if len(items) else np.zeros(1, np.int64)
    found_BL = some[np.minimum(within_BL, len(some) - 1)]
    return torch.from_numpy(np.where(within_BL < stops_B[:, None], found_BL, none).astype(np.int64))
