"""Parser of device texts: `auto`, `auto*2`, `cpu`, `cpu*8`, `cuda:0`, `cuda:0,cuda:1`, `cuda:0*4`.

Pure Python, so that a config can be checked without torch. `dphybrid.parallel.resolve_devices` finds the
hardware for a text.
"""

import re
from dataclasses import dataclass

from dphybrid.util.errors import UserError

# At most nine digits: int() raises ValueError for thousands of them.
_ITEM = re.compile(r"(?P<kind>auto|cpu|cuda)(?::(?P<index>\d{1,9}))?(?:\*(?P<count>\d{1,9}))?")
_HELP = (
    "use auto, auto*2 (two free GPUs), cpu, cpu*8 (eight virtual devices), cuda:0, cuda:0,cuda:1 or "
    "cuda:0*4 (four virtual devices on one GPU)"
)
MAX_DEVICES = 64


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed device text.

    Attributes:
        names: One device name for each replica (`("cpu",) * 8` for `cpu*8`); empty for `auto`.
        virtual: Whether replicas share hardware, as in `cpu*8`, `cuda:0*4` or `cuda:0,cuda:0`.
        count: The 2 of `auto*2`, else 0.
    """

    text: str
    names: tuple[str, ...]
    virtual: bool
    count: int = 0

    @property
    def is_auto(self) -> bool:
        return not self.names


def parse_device_spec(text: str) -> DeviceSpec:
    """Parse a device text. Raises UserError that names the part it could not read."""
    cleaned = text.replace(" ", "").lower()
    names: list[str] = []
    for item in cleaned.split(","):
        match = _ITEM.fullmatch(item)
        if match is None or (match["kind"] == "auto" and (match["index"] or item != cleaned)):
            raise UserError(f"cannot read {item!r}; {_HELP}")
        kind, index, count = match["kind"], match["index"], int(match["count"] or 1)
        if kind == "cpu" and index not in (None, "0"):
            raise UserError(f"{item!r} does not exist, as there is only one cpu; {_HELP}")
        if not 1 <= count <= MAX_DEVICES:
            raise UserError(f"{count} devices in {item!r}; use 1 to {MAX_DEVICES}")
        if kind == "auto":
            return DeviceSpec(cleaned, (), False, int(match["count"] or 0))
        names += [kind if kind == "cpu" else f"cuda:{int(index or 0)}"] * count
    if len({name.split(":")[0] for name in names}) > 1:
        raise UserError("cpu and cuda cannot share one split; name one kind")
    if len(names) > MAX_DEVICES:
        raise UserError(f"{len(names)} devices; use 1 to {MAX_DEVICES}")
    return DeviceSpec(cleaned, tuple(names), len(set(names)) < len(names))
