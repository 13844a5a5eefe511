"""Machine code of kernels: numba compiles a kernel once, and it is kept as an object file, which llvmlite
loads in milliseconds. Where all kernels are kept nothing imports numba, which takes longer than they do."""

import hashlib
import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dphybrid.embedding.team import Kernel
from dphybrid.util.errors import UserError
from dphybrid.util.files import write_bytes

_DIGEST_BYTES = 32


def keep_compiled_in(folder: Path) -> None:
    """Have machine code kept under `folder`, unless the user said where (NUMBA_CACHE_DIR)."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))


def compiled_folder(data_dir: Path) -> Path:
    """Return where machine code is kept: in the user's cache folder, which all data folders share, or, where
    that cannot be written, in `data_dir`."""
    usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local")}
    place = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    try:
        folder = Path(place).expanduser()
    except RuntimeError:  # a service without a home
        return data_dir / "compiled"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    return (folder / "dphybrid" if writable else data_dir) / "compiled"


def folder_of(module: str) -> Path:
    """Return where a module's machine code is kept: a folder for each state of the sources."""
    keep_compiled_in(compiled_folder(Path(os.environ.get("DPHYBRID_DATA_DIR", "~/.dphybrid")).expanduser()))
    return Path(os.environ["NUMBA_CACHE_DIR"]) / _sources_digest(module)


def kernel_of(module: str, name: str, *constants: int) -> Kernel:
    """Return the kernel that `module.NAME_kernel(*constants)` makes a function for: one argument, the address
    of a page of int64 numbers. Raises UserError without numba."""
    if importlib.util.find_spec("numba") is None:
        raise UserError("tables in host memory need numba, which is not installed; pip install numba")
    numbers = "".join(f"-{constant}" for constant in constants)
    file = folder_of(module) / f"{name}{numbers}-{_processor_digest()}.o"
    code = _kept(file)
    if code is None:
        function = getattr(importlib.import_module(module), f"{name}_kernel")(*constants)
        code = _compiled(function)
        with suppress(OSError):  # a full or a foreign disk: the next process compiles it again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, hashlib.sha256(code).digest() + code)
    return _loaded(code)


def _kept(file: Path) -> bytes | None:
    """Return the code in a file, None where it cannot be read or is not whole."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _compiled(function: Any) -> bytes:
    """Return an object file with `kernel`, which calls the function.

    numba's own way in tells Python of errors, which kernels have none of; without it the code asks for
    nothing that numba would have to be there for.
    """
    import numba
    from llvmlite import binding as llvm

    made = numba.cfunc(numba.types.void(numba.types.int64), error_model="numpy")(function)
    own = made.native_name.removeprefix("cfunc.")
    entry = (
        "define void @kernel(i64 %page) { %result = alloca ptr\n %error = alloca ptr\n"
        f'%status = call i32 @"{own}"(ptr %result, ptr %error, i64 %page)\n ret void }}'
    )
    module = llvm.parse_assembly(f"{made.inspect_llvm()}\n{entry}")
    module.get_function(made.native_name).linkage = "available_externally"
    return bytes(_machine().emit_object(module))


def _loaded(code: bytes) -> Kernel:
    from llvmlite import binding as llvm

    machine = _machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address("kernel")
    engine.detach()  # the code stays: a thread may run what another one has just loaded once more
    return Kernel(address)


def _machine() -> Any:
    """Return what numba makes code for, too: this processor with all it has."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


@cache
def _sources_digest(module: str) -> str:
    here = Path(__file__).parent
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    parts = [here / name for name in ("machine_code.py", "sizes.py", "compiled.py", "vectors.py")]
    sources = b"".join(part.read_bytes() for part in [*parts, Path(spec.origin)])
    return hashlib.sha256(sources).hexdigest()[:12]


@cache
def _processor_digest() -> str:
    import llvmlite
    from llvmlite import binding as llvm

    text = f"{llvmlite.__version__} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
