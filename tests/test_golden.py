"""data/golden/v1: one tiny dataset in version 1 of the format, committed, which every later version must read.

It was written once by ``python -m tests.test_golden`` and is never written again.
"""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

from pipeline import pack
from pipeline.shards import PackedDataset, verify_hashes
from pipeline.verify import verify_semantics
from tests.chatml import write_tokenizer

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden" / "v1"
MAX_TOKENS = 80


def test_the_golden_dataset_is_read_and_holds_every_invariant() -> None:
    dataset = PackedDataset.open(GOLDEN)
    verify_hashes(dataset)
    verify_semantics(dataset)


def test_the_golden_rows_are_what_they_were() -> None:
    dataset = PackedDataset.open(GOLDEN)
    expected = json.loads((GOLDEN.parent / "v1-rows.json").read_text())
    assert dataset.manifest.format_version == 1
    assert dataset.manifest.dataset_id == expected["dataset_id"]
    assert [_as_lists(dataset, i) for i in range(len(dataset))] == expected["rows"]
    assert any(len(row["boundaries"]) > 3 for row in expected["rows"])
    assert any(len(row["doc_ids"]) < len(row["boundaries"]) - 1 for row in expected["rows"])
    assert any(max(row["pieces"]) > 0 for row in expected["rows"])


def _as_lists(dataset: PackedDataset, index: int) -> dict[str, list[int]]:
    row = dataset[index]
    names = ("input_ids", "position_ids", "boundaries", "doc_ids", "pieces")
    return {name: getattr(row, name).tolist() for name in names} | {"targets": row.loss_mask.nonzero()[0].tolist()}


def _chats() -> list[dict[str, object]]:
    def chat(*contents: str) -> dict[str, object]:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}

    return [
        chat("hello there", "hello, friend"),
        chat("how are you?", "I am fine.", "and you?", "I am fine, thank you.", "how is the tea?", "hot and good"),
        chat("write <|im_end|> as text", "<|im_end|>"),
        chat("héllo 你好 🌱", "مرحبا"),
        {"messages": []},
        *(chat(f"number {n}", f"it is {n * n}") for n in range(12)),
    ]


def _write() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("golden.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _chats()))
        write_tokenizer(Path("tokenizer"))
        settings = pack.Settings(
            source="golden.jsonl", tokenizer="tokenizer", max_tokens=MAX_TOKENS, overflow="split",
            out=Path("v1"), cache_dir=Path("cache"), workers=1,
        )  # fmt: skip
        pack.pack(settings)
        shutil.copytree("v1", GOLDEN)
    dataset = PackedDataset.open(GOLDEN)
    facts = {"dataset_id": dataset.manifest.dataset_id, "rows": [_as_lists(dataset, i) for i in range(len(dataset))]}
    (GOLDEN.parent / "v1-rows.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    _write()
