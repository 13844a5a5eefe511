"""The former place of what a model factory needs; it is in `dphybrid.recipes` now."""

from dphybrid.recipes import DeclaresIds, ModelContext, build_from_config, build_model

__all__ = ["DeclaresIds", "ModelContext", "build_from_config", "build_model"]
