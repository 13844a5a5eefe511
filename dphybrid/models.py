"""The former place of what a model factory needs; it is in `dphybrid.recipes` now."""

from dphybrid.embedding import DeclaresIds
from dphybrid.recipes.context import ModelContext, build_from_config, build_model

__all__ = ["DeclaresIds", "ModelContext", "build_from_config", "build_model"]
