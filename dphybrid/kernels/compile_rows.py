"""Compiles rows.c when the package is installed, or at first use in a checkout that was never installed.

Also the build backend of pyproject.toml: that of setuptools, plus `ziglang` (a C compiler from PyPI) as a
build requirement if the machine has no compiler. Uses only the standard library, as it runs before torch is
installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SOURCES = ("rows.c", "rules.h", "rows_of_types.h", "rows_of.h", "bins.h", "pairs.h")
# No fused multiply-add (-ffp-contract=off): it rounds once where other processors round twice. The two -fno
# flags drop errno and trap handling that would keep loops from being vectorised; they change no result.
_FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-Wno-psabi"]


def levels() -> tuple[str, ...]:
    """Return the instruction sets for which libraries are compiled on this kind of machine."""
    machine = platform.machine().lower()
    return ("x86-64-v2", "x86-64-v3", "x86-64-v4") if machine in ("x86_64", "amd64") else (machine,)


def library_name(level: str) -> str:
    """Return the file name of a library. It contains a hash of the sources, so that edited sources are never
    used with an old library."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in _SOURCES)).hexdigest()
    return f"_rows-{level}-{digest[:12]}.so"


def compiler() -> list[str] | None:
    """Return the command of a C compiler: $CC, the machine's, or ziglang's; None if there is none."""
    if command := os.environ.get("CC"):
        return shlex.split(command)
    if program := next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None):
        return [program]
    return [sys.executable, "-P", "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def compile_library(level: str, folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compile rows.c for one instruction set into `folder`; return the library's path.

    The file appears under that path only when it is complete, so processes may compile at the same time.
    Raises RuntimeError with the compiler's output if it fails.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("rows.c needs a C compiler: install gcc or clang, or `pip install ziglang`")
    target = [f"-march={level}"] if level.startswith("x86-64") else []
    # zig has other names for the option and the levels.
    if "ziglang" in command:
        target = [option.replace("-march", "-mcpu").replace("x86-64-", "x86_64_") for option in target]
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / library_name(level)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rows-") as scratch:
        made = Path(scratch) / "rows.so"
        line = [*command, *_FLAGS, *target, *flags, str(HERE / "rows.c"), "-o", str(made)]
        # ziglang caches in the home folder by default, which a build environment may lack.
        cache = {"ZIG_GLOBAL_CACHE_DIR": f"{scratch}/global", "ZIG_LOCAL_CACHE_DIR": f"{scratch}/local"}
        done = subprocess.run(line, capture_output=True, text=True, env={**cache, **os.environ}, check=False)
        if done.returncode:
            raise RuntimeError(f"rows.c: {shlex.join(line)} failed:\n{done.stderr[-4000:]}")
        made.replace(final)
    return final


def __getattr__(hook: str) -> Any:
    """Return a hook of the build backend: that of setuptools. The hooks that list build requirements add a
    compiler if the machine has none."""
    if not hook.startswith(("build_", "get_requires_", "prepare_metadata_")):
        raise AttributeError(hook)
    from setuptools import build_meta

    own = getattr(build_meta, hook)
    if hook not in ("get_requires_for_build_wheel", "get_requires_for_build_editable") or compiler():
        return own
    return lambda settings=None: [*own(settings), "ziglang>=0.13"]
