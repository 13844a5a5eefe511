"""Whether a run used its devices well: idle and uneven replicas, GPUs that waited, and the stage they waited
for."""

from collections.abc import Mapping, Sequence
from typing import Any

UNEVEN = 1.25
"""Largest share of a batch over the smallest, from which on a split is called uneven."""

BUSY_PCT = 50.0
"""A GPU below this mean utilisation waits more than it works."""

_DEVICE_STAGES = ("forward", "backward", "replicate", "scatter", "gather", "loss", "dense_update")


def balance_warnings(
    splits: Sequence[Mapping[str, Any]],
    num_devices: int,
    system: Mapping[str, float],
    stages: Mapping[str, float],
) -> list[str]:
    """Return a sentence with a remedy for each thing found.

    splits: rows of the split table. system: means of the `system/...` metrics. stages: stage ->
    seconds.
    """
    return _of_the_split(splits, num_devices) + _of_the_gpus(system, stages)


def _of_the_split(splits: Sequence[Mapping[str, Any]], num_devices: int) -> list[str]:
    full = [row for row in splits if row["number"] == 1]
    first = [row for row in full if row["block"] == full[0]["block"]]
    if num_devices < 2 or not first:
        return []
    rows, batch = [int(row["rows"]) for row in first], int(first[0]["batch_rows"])
    remedy = (
        f"a batch of a multiple of {num_devices} rows, such as "
        f"{-(-batch // num_devices) * num_devices}, fills all alike"
    )
    if len(rows) < num_devices:
        return [
            f"{num_devices - len(rows)} of {num_devices} devices got no rows of a batch of {batch}; {remedy}"
        ]
    if max(rows) >= UNEVEN * min(rows):
        return [f"one device got {min(rows)} rows of a batch of {batch} and the others {max(rows)}; {remedy}"]
    return []


def _of_the_gpus(system: Mapping[str, float], stages: Mapping[str, float]) -> list[str]:
    suffix = "_utilization_pct"
    busy = {
        name.removeprefix("system/").removesuffix(suffix): value
        for name, value in system.items()
        if name.endswith(suffix)
    }
    if not busy:
        return []
    most, least = max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)
    if busy[most] < BUSY_PCT:
        waited = {stage: seconds for stage, seconds in stages.items() if stage not in _DEVICE_STAGES}
        words = f"the busiest GPU, {most}, worked {busy[most]:.0f}% of the time"
        if waited:
            stage = max(waited, key=waited.__getitem__)
            words += (
                f"; the largest stage outside it is {stage} "
                f"({waited[stage] / sum(stages.values()):.0%} of the time)"
            )
        return [f"{words}; a larger batch or fewer GPUs would use it better"]
    if len(busy) > 1 and busy[least] < BUSY_PCT / 100 * busy[most]:
        return [
            f"{least} worked {busy[least]:.0f}% of the time and {most} {busy[most]:.0f}%; "
            "look at the split above, and at who else computes there (`dphybrid devices`)"
        ]
    return []
