"""Wrong input: values and paths that have caused errors before, and edits that break good files."""

CONFIG = b"""recipe = "ctr"
devices = "cpu*2"
[data]
path = "clicks.csv"
label = "clicked"
[train]
epochs = 2
lr = 0.01
"""
PIECES = [b"\x00", b"\xff\xfe", b'"', b"'", b",", b"\n", b"\r", b"\t", b"[", b"]", b"{", b"=", b"-1", b"\\"]
PIECES += [b"nan", b"1e400", b"9" * 30, b"\xe2\x80\xae", b"a" * 300, b"[[" * 50, b".", b"~", b"*", b"#"]

PATHS = ["", " ", "~nosuchuser/x", "a**b*.csv", "x" * 300, "no/such/file.csv", "/dev/null", "/proc/self/mem"]
PATHS += ["a\x00b", "[", "*", "{folder}/clicks.csv/x", "\udcff", "-", "{}", "/root/../etc/shadow"]
OVERRIDES = ["=", "", "a=b", "train=1", "train.lr=nan", "train.lr=1e400", "train.batch_size=-1"]
OVERRIDES += ["train.batch_size=1e3", "train.epochs=" + "9" * 5000, "train.seed=-1", "devices="]
OVERRIDES += ["devices=cpu*0", "devices=cpu,cuda:0", "devices=cuda:99", "devices=cpu*" + "9" * 5000]
OVERRIDES += ["recipe=", "recipe=os:system", "recipe=builtins:int", "model.factory=os:system"]
OVERRIDES += ["model.dim=1e99", "data.label=absent", "data.min_count=0"]


def edited(content: bytes, change: str, place: float, length: int, piece: bytes) -> bytes:
    """Return content with one change (see `CHANGES`). place: where, from 0 (start) to 1 (end)."""
    start = int(place * len(content))
    stop = min(len(content), start + length)
    before, part, behind = content[:start], content[start:stop], content[stop:]
    return {
        "put in": before + piece + part + behind,
        "replace": before + piece + behind,
        "take out": before + behind,
        "repeat": before + part * 3 + behind,
        "flip": before + bytes(byte ^ 1 << byte % 8 for byte in part) + behind,
        "cut off": before,
    }[change]


CHANGES = ("put in", "replace", "take out", "repeat", "flip", "cut off")
