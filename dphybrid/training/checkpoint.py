"""Checkpoints as folders: tensors in safetensors files, everything else in a page of JSON; no pickle.

`step-000500/` holds `blocks.safetensors` (dense parameters and buffers), `blocks_optimizer.safetensors`, `tables/NAME.safetensors`
(table and its row states) and `state.json` (step, cursor, generator states, metrics, sha256 of every file). Written beside, fsynced,
renamed: a folder with its final name is complete. The keys carry no `module.`, so 1, 8 or virtual devices read each other's files.
"""

import json
import os
import shutil
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dphybrid.embedding import RowOptimizer, find_tables
from dphybrid.training.tensor_file import file_digest, read_into, read_tensors, tensor_shapes, write_tensors
from dphybrid.util.errors import UserError

FORMAT = 1


@dataclass
class Progress:
    """How far training is. step counts optimizer steps; batch is the next batch of the epoch; history has a row an epoch.

    micro_batches: parts that a batch is computed in, after it did not fit into memory.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    stale_epochs: int = 0
    best_value: float | None = None
    best_step: int | None = None
    epoch_loss: float = 0.0
    epoch_weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    micro_batches: int = 1
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """The four things that training changes."""

    model: nn.Module
    dense: torch.optim.Optimizer | None
    rows: RowOptimizer | None
    progress: Progress


def save_checkpoint(
    folder: Path, trained: Trained, config: Mapping[str, Any], facts: Mapping[str, Any], encoder: Path | None = None
) -> Path:
    """Write a checkpoint under `folder` and return its path.

    config: the experiment's values. facts: what else belongs into state.json (digests of data, devices). encoder: folder of what
    turns new rows into the model's input; a copy of it makes the checkpoint ready to predict.
    """
    step = trained.progress.step
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "tables").mkdir(parents=True)
        digests: dict[str, str] = {}
        tables = find_tables(trained.model)
        for name, tensors in _table_tensors(trained).items():
            digests[f"tables/{name}.safetensors"] = write_tensors(partial / "tables" / f"{name}.safetensors", tensors)
        digests["blocks.safetensors"] = write_tensors(partial / "blocks.safetensors", dense_state(trained.model, set(tables)))
        if encoder is not None:
            shutil.copytree(encoder, partial / "encoder")
            digests |= {f"encoder/{file.name}": file_digest(file) for file in sorted((partial / "encoder").iterdir())}
        optimizer_page: dict[str, Any] = {}
        if trained.dense is not None:
            tensors, optimizer_page = _flatten_optimizer(trained.dense.state_dict())
            digests["blocks_optimizer.safetensors"] = write_tensors(partial / "blocks_optimizer.safetensors", tensors)
        page = {
            "format": FORMAT,
            "progress": asdict(trained.progress),
            "config": dict(config),
            **facts,
            "optimizer": optimizer_page,
            "generators": _generator_states(),
            "sha256": digests,
        }
        with (partial / "state.json").open("w", encoding="utf-8") as file:
            json.dump(page, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # the same step again, after a resume: the same bits, perhaps with metrics now
            old = folder / f".{final.name}.old-{os.getpid()}"
            final.rename(old)
            partial.rename(final)
            shutil.rmtree(old)
        else:
            partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync_folder(folder)
    return final


def load_checkpoint(path: Path, trained: Trained) -> dict[str, Any]:
    """Fill model, optimizers and progress from a checkpoint; return its state page.

    Raises UserError that names every missing, unexpected or differently shaped entry, and any damaged file.
    """
    page = read_state(path)
    for name, digest in page["sha256"].items():
        if not (path / name).is_file() or file_digest(path / name) != digest:
            raise UserError(f"{path / name}: missing or damaged (its sha256 differs from state.json); use another checkpoint")
    load_weights(path, trained.model)
    if trained.dense is not None:
        tensors = read_tensors(path / "blocks_optimizer.safetensors")
        trained.dense.load_state_dict(_unflatten_optimizer(tensors, page["optimizer"]))
    if trained.rows is not None:
        _load_row_states(path, trained.rows, find_tables(trained.model))
    for key, value in page["progress"].items():
        setattr(trained.progress, key, value)
    _restore_generators(page["generators"])
    return page


def load_weights(path: Path, model: nn.Module, skip: Container[str] = ()) -> None:
    """Fill tables (but those named in `skip`) and blocks of `model` in place from a checkpoint, on whatever devices they are.

    Raises UserError on mismatch.
    """
    tables = find_tables(model)
    blocks = read_tensors(path / "blocks.safetensors")
    wanted = dense_state(model, set(tables))
    problems = [f"missing {name}" for name in wanted.keys() - blocks.keys()] + [
        f"unexpected {name}" for name in blocks.keys() - wanted.keys()
    ]
    problems += [
        f"{name} is {tuple(blocks[name].shape)} in the file and {tuple(wanted[name].shape)} in the model"
        for name in wanted.keys() & blocks.keys()
        if blocks[name].shape != wanted[name].shape
    ]
    problems += [f"missing table {name}" for name in tables if not (path / "tables" / f"{name}.safetensors").is_file()]
    if problems:
        raise UserError(f"{path}: does not fit this model: {'; '.join(sorted(problems))}; use the config it was trained with")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(blocks[name])
        for name in (name for name in tables if name not in skip):
            read_into(path / "tables" / f"{name}.safetensors", "weight", tables[name].weight)


def dense_state(model: nn.Module, tables: set[str]) -> dict[str, Tensor]:
    """Return parameters and buffers of the blocks by portable name, as references."""
    return {
        key: value
        for key, value in model.state_dict().items()
        if key.rpartition(".")[0] not in tables and isinstance(value, Tensor)
    }


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON page of a checkpoint. Raises UserError when there is none or of another format."""
    try:
        page = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no checkpoint ({error}); name a step-... folder") from error
    if page.get("format") != FORMAT:
        raise UserError(f"{path}: has checkpoint format {page.get('format')}, this version reads {FORMAT}")
    return page


def _table_tensors(trained: Trained) -> dict[str, dict[str, Tensor]]:
    states = trained.rows.state_dict() if trained.rows is not None else {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, table in find_tables(trained.model).items():
        own = {key.removeprefix(f"{name}."): value for key, value in states.items() if key.startswith(f"{name}.")}
        tensors[name] = {"weight": table.weight, **own}
    extra = {key: value for key, value in states.items() if key.rpartition(".")[0] not in tensors}
    if extra:
        tensors["_optimizer"] = extra
    return tensors


def _load_row_states(path: Path, rows: RowOptimizer, tables: Mapping[str, Any]) -> None:
    places: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in [*tables, "_optimizer"]:
        file = path / "tables" / f"{name}.safetensors"
        for key, shape in tensor_shapes(file).items() if file.is_file() else ():
            if key != "weight":
                whole = key if name == "_optimizer" else f"{name}.{key}"
                places[whole], shapes[whole] = (file, key), shape
    rows.check_shapes(shapes)
    for key, target in rows.state_dict().items():
        read_into(*places[key], target)


def _flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            place = tensors if isinstance(value, Tensor) else numbers
            place[f"{index}.{key}"] = value
    return tensors, {"groups": state["param_groups"], "numbers": numbers}


def _unflatten_optimizer(tensors: dict[str, Tensor], page: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **page["numbers"]}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": page["groups"]}


def _generator_states() -> dict[str, Any]:
    cuda = [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state().numpy().tobytes().hex(), "cuda": cuda}


def _restore_generators(states: dict[str, Any]) -> None:
    def as_tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(as_tensor(states["torch"]))
    if torch.cuda.is_available():
        for index, text in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(as_tensor(text), index)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
