"""Files of tensors: what is written is read, whole, by slices and mapped; damage and foreign files are
refused when a checkpoint is opened."""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dphybrid.embedding import HostEmbedding
from dphybrid.embedding.storage import deferred_rows
from dphybrid.serving.load import model_from_checkpoint
from dphybrid.serving.pyfunc import LoadedCheckpoint
from dphybrid.training.checkpoint import (
    complete_checkpoints,
    newest_whole_checkpoint,
    read_state,
    verify_checkpoint,
)
from dphybrid.training.tensor_file import (
    IDS,
    changed_file,
    mapped_weight,
    read_table,
    read_tensors,
    rows_of,
    table_file,
    write_tensors,
)
from dphybrid.util.digests import value_digest
from tests.commands import run_with
from tests.conftest import own_settings
from tests.preparing import clicks
from tests.refusing import refused
from tests.reliability.damages import damage

NUM_ROWS, DIM = 3000, 100


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
def test_buffers_of_rarer_types_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """`complex64` is the usual type of precomputed rotary embeddings."""
    values = torch.arange(6.0).view(2, 3)
    given = (torch.complex(values, -values) if dtype.is_complex else values).to(dtype)
    write_tensors(tmp_path / "blocks.safetensors", {"buffer": given})
    kept = read_tensors(tmp_path / "blocks.safetensors")["buffer"]
    assert kept.dtype == dtype
    assert kept.tolist() == given.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_is_read_in_slices_and_mapped(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids, rows = torch.tensor([3, 2999]), torch.ones(2, DIM, dtype=dtype)
    for file in (table_file(tmp_path, "a/b"), changed_file(tmp_path, "a/b")):
        file.parent.mkdir()
    crc = write_tensors(table_file(tmp_path, "a/b"), {"state": torch.arange(7), "weight": weight})
    whole = table_file(tmp_path, "a/b").read_bytes()
    assert crc == f"{zlib.crc32(whole):08x}"
    assert torch.equal(load_file(table_file(tmp_path, "a/b"))["weight"], weight)
    write_tensors(changed_file(tmp_path, "a/b"), {rows_of("weight"): rows, IDS: ids})
    monkeypatch.setattr("dphybrid.training.tensor_file._READ_BYTES", 10_000)
    expected, read = weight.index_copy(0, ids, rows), torch.zeros_like(weight)
    read_table(tmp_path, "a/b", "weight", read)
    with deferred_rows():
        table = HostEmbedding(NUM_ROWS, DIM, dtype=dtype)
    table.weight = nn.Parameter(mapped_weight(tmp_path, "a/b", table.weight.detach()), requires_grad=False)
    assert torch.equal(read, expected)
    assert torch.equal(table.weight.detach(), expected)
    table.weight.detach()[:] = 0.0
    assert table_file(tmp_path, "a/b").read_bytes() == whole


def test_tables_of_other_names_have_other_files(tmp_path: Path) -> None:
    names = ["a/b", "a%2Fb", "a%252Fb", "50%", "50%25"]
    assert len({table_file(tmp_path, name) for name in names}) == len(names)


SMALL = ["recipe=hybrid", "train.epochs=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        own_settings(patch, tmp_path_factory.mktemp("tensor_file") / "data", TRACKING_URI="none")
        yield Path(run_with(*SMALL).best_checkpoint)


def rewrite(folder: Path, **values: object) -> None:
    """Change values of a page, with the right checksum."""
    page = json.loads((folder / "state.json").read_bytes()) | values
    page.pop("page_sha256")
    (folder / "state.json").write_text(json.dumps(page | {"page_sha256": value_digest(page)}))


def test_rot_that_keeps_times_is_found_by_all_that_open_a_checkpoint(checkpoint: Path) -> None:
    for name in ("blocks.safetensors", "tables/*.safetensors"):
        (file,) = checkpoint.glob(name)
        whole = file.read_bytes()
        damage(file, whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        for opens in (
            verify_checkpoint,
            model_from_checkpoint,
            lambda folder: model_from_checkpoint(folder, mapped=True),
            LoadedCheckpoint,
            lambda folder: newest_whole_checkpoint(folder.parent),
        ):
            with refused(r"safetensors: is damaged \(its checksum differs\)"):
                opens(checkpoint)
        file.write_bytes(whole)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_out(file: Path) -> None:
    other = file.rename(file.parents[2] / "elsewhere")
    file.symlink_to(other)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def test_a_folder_with_other_than_files_of_its_own_is_refused(checkpoint: Path) -> None:
    for make in (pipe, link_out, device):
        for name in ("state.json", "blocks.safetensors", "extra.safetensors"):
            copied = shutil.copytree(checkpoint, checkpoint.parent / f"{make.__name__}-{name}" / "copy")
            (copied / name).touch()
            make(copied / name)
            with refused(
                rf"{name}: is (a link|neither a file nor a folder), which this folder must not have"
            ):
                model_from_checkpoint(copied)


OTHER_PAGES: list[tuple[dict[str, object], str]] = [
    ({"sha256": {"../../run.json": "0" * 64}}, "outside of this folder"),
    ({"crc32": {"/etc/hostname": "0" * 8}}, "outside of this folder"),
    ({"generators": {"torch": "xyz", "cuda": []}}, "optimizers or generators do not fit"),
    ({"optimizer": {"groups": 5, "numbers": {}}}, "optimizers or generators do not fit"),
    ({"optimizer": {"groups": [], "numbers": {"lr": 1}}}, "optimizers or generators do not fit"),
    ({"optimizer": {"groups": [{}], "numbers": {}}}, "optimizers or generators do not fit"),
    ({"progress": {"step": "many"}}, "progress.step"),
    ({"version": "x"}, "version"),
]


def test_a_page_of_another_form_is_refused_without_a_traceback(checkpoint: Path) -> None:
    whole = (checkpoint / "state.json").read_bytes()
    for values, words in OTHER_PAGES:
        rewrite(checkpoint, **values)
        with refused(words):
            run_with(*SMALL, "train.epochs=2", resume=checkpoint.parents[1].name)
        (checkpoint / "state.json").write_bytes(whole)


def test_info_of_another_form_is_refused_without_a_traceback(
    data_dir: Path, tmp_path: Path, unrecorded: None
) -> None:
    small = ["model.dim=2", "model.hidden=4", "model.layers=1", "train.epochs=1"]
    checkpoint = Path(run_with(*clicks(tmp_path), *small).best_checkpoint)
    for info in ({}, {"num_ids": "many"}, {"num_ids": [1e308]}, {"num_ids": [[]], "label": 5}):
        rewrite(checkpoint, info=info)
        with refused(r"state.json: cannot be read"):
            model_from_checkpoint(checkpoint)


def test_checkpoints_are_incremental_only_where_few_rows_change_between_them(
    data_dir: Path, unrecorded: None
) -> None:
    def since_full(*options: str) -> list[int]:
        report = run_with(*SMALL, "checkpoint.keep_last=99", *options)
        folder = Path(report.best_checkpoint).parent
        return [read_state(path).since_full for path in complete_checkpoints(folder)]

    of_steps = ("checkpoint.every_steps=1", "train.batch_size=128", "table.optimizer=sgd")
    of_steps += ("train.limit_batches=4",)
    assert since_full("train.epochs=3") == [0, 0, 0]  # an epoch changes most rows
    assert since_full(*of_steps) == [0, 1, 2, 3]
