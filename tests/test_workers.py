"""What workers share, and what they hold."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline.assemble
import pipeline.publish
from pipeline.pack import Settings, pack
from pipeline.rows import parquet_file
from pipeline.shards import PackedDataset, _positions, verify_hashes
from pipeline.workers import Workers, shared
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet


def whose(_: int) -> tuple[int, int, Any]:
    return os.getpid(), id(shared()), shared()


def test_every_process_gets_one_copy_of_what_is_shared_whatever_the_number_of_jobs() -> None:
    with Workers(2, shared={"a": [1, 2]}) as workers:
        found = list(workers.map(whose, [(i,) for i in range(40)]))
    assert all(value == {"a": [1, 2]} for _, _, value in found)
    assert os.getpid() not in {pid for pid, _, _ in found}
    assert len({(pid, place) for pid, place, _ in found}) == len({pid for pid, _, _ in found})


def test_one_worker_is_this_process_and_shares_the_thing_itself() -> None:
    value = object()
    with Workers(1, shared=value) as workers:
        assert list(workers.map(whose, [(0,), (1,)])) == [(os.getpid(), id(value), value)] * 2


def test_building_a_shard_leaves_no_block_of_the_cache_mapped_or_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real, num_shards = (tmp_path / "cache").resolve(), pipeline.assemble.build_shard, 0

    def build(*args: Any) -> dict[str, Any]:
        nonlocal num_shards
        entry = real(*args)
        num_shards += 1
        held = Path("/proc/self/maps").read_text() + "".join(
            str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.exists()
        )
        assert f"{cache}/" not in held.replace(f"{cache}\n", "")
        return entry

    monkeypatch.setattr(pipeline.publish, "build_shard", build)
    source = write_parquet(tmp_path / "train.parquet", small_chats(300))
    settings = Settings(source=str(source), tokenizer=str(write_tokenizer(tmp_path / "tok")), max_tokens=4096,
                        out=tmp_path / "out", cache_dir=cache, workers=1)  # fmt: skip
    pack(settings)
    assert num_shards


def test_a_block_that_was_cut_short_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.publish.build_shard

    def build(job: Any, *args: Any) -> dict[str, Any]:
        for path in map(Path, job.paths):
            path.chmod(0o644)
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
        return real(job, *args)

    monkeypatch.setattr(pipeline.publish, "build_shard", build)
    source = write_parquet(tmp_path / "train.parquet", small_chats(300))
    with pytest.raises(OSError, match="shorter than it was"):
        pack(Settings(source=str(source), tokenizer=str(write_tokenizer(tmp_path / "tok")), max_tokens=4096,
                      out=tmp_path / "out", cache_dir=tmp_path / "cache", workers=1))  # fmt: skip
    assert not (tmp_path / "out" / "manifest.json").exists()


@given(st.lists(st.sets(st.integers(1, 19), max_size=8), min_size=1, max_size=5))
def test_positions_restart_at_every_boundary(rows: list[set[int]]) -> None:
    bounds = [[0, *sorted(inner), 20] for inner in rows]
    wanted = [i for row in bounds for a, b in pairwise(row) for i in range(b - a)]
    assert _positions(np.array([b for row in bounds for b in row], np.int32)).tolist() == wanted


def test_checking_hashes_reports_every_byte_of_the_dataset(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "train.parquet", small_chats(60))
    manifest = pack(Settings(source=str(source), tokenizer=str(write_tokenizer(tmp_path / "tok")), max_tokens=256,
                             out=tmp_path / "out", cache_dir=tmp_path / "cache", workers=1))  # fmt: skip
    read: list[int] = []
    verify_hashes(PackedDataset.open(tmp_path / "out"), progress=read.append)
    assert read == [entry["bytes"] for entry in manifest.all_files()]


def test_a_row_group_is_read_in_parts_and_not_held_whole(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 2**63, (6000, 100))
    chats = [[{"role": "user", "content": " ".join(map(str, row))}] for row in words]
    path = write_parquet(tmp_path / "train.parquet", chats, rows_in_group=6000)
    assert path.stat().st_size > 6 << 20
    before = pa.total_allocated_bytes()
    batches = parquet_file(path).iter_batches(batch_size=64, columns=["messages"])
    held = max(pa.total_allocated_bytes() - before for _ in batches)
    assert held < 0.8 * path.stat().st_size
