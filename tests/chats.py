"""Small chats of random words, and parquet files of chats."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TEXT = "the star pot seed of river and note map light how many grow warm code day tea small run blue"


def small_chats(num: int, *, seed: int = 0, longest: int = 40) -> list[list[dict[str, str]]]:
    """Chats of one to three rounds of random words."""
    rng = np.random.default_rng(seed)

    def words() -> str:
        return " ".join(rng.choice(TEXT.split(), int(rng.integers(1, longest))))

    def chat() -> list[dict[str, str]]:
        rounds = range(int(rng.integers(1, 4)))
        return [{"role": role, "content": words()} for _ in rounds for role in ("user", "assistant")]

    return [chat() for _ in range(num)]


def write_parquet(path: Path, chats: list[Any], *, rows_in_group: int = 50) -> Path:
    """Write chats as a parquet file with a messages column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"messages": chats}), path, row_group_size=rows_in_group)
    return path
