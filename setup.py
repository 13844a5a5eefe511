"""What pyproject.toml cannot express: the package contains libraries compiled from rows.c, so a wheel is for
this platform but for any Python 3."""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Run by path, not imported: `import dphybrid.kernels` would import torch, which the build environment lacks.
compiling = runpy.run_path(str(Path(__file__).parent / "dphybrid" / "kernels" / "compile_rows.py"))


class CompileRows(build_ext):
    """Compiles one library per instruction set; into the source folder for `pip install -e`."""

    def _folder(self) -> Path:
        package = Path("dphybrid", "kernels")
        return package if self.inplace else Path(self.build_lib) / package

    def run(self) -> None:
        folder = self._folder()
        # The file names contain a hash of the sources, so older libraries would stay beside the new ones.
        for old in folder.glob("_rows-*.so"):
            old.unlink()
        for level in compiling["levels"]():
            compiling["compile_library"](level, folder)

    def get_outputs(self) -> list[str]:
        return [str(self._folder() / compiling["library_name"](level)) for level in compiling["levels"]()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPython(bdist_wheel):
    """A wheel for this platform and every Python 3: the libraries do not use Python's C API."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("dphybrid.kernels._rows", ["dphybrid/kernels/rows.c"])],
    cmdclass={"build_ext": CompileRows, "bdist_wheel": AnyPython},
)
