"""The Hugging Face hub as a source of chats: which commit, which files, and where ``datasets`` put them.

Nothing here is imported, and the network is not touched, unless a hub id is asked for.
"""

import re
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LOCAL_OPTIONS = (
    "Without a network, use local data: --source FILE.parquet | FILE.jsonl | FOLDER and --tokenizer FOLDER (one that "
    "holds tokenizer.json and a chat template); data/sample is both: --source data/sample --tokenizer data/sample"
)


def hub_identity(spec: str, split: str, revision: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Resolve a hub id: its commit, and the split's files with the digests the hub gives.

    Raises:
        ValueError: the hub is out of reach, or has no such dataset.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(spec, revision=revision, files_metadata=True, timeout=10)
    except Exception as error:  # the hub client raises its HTTP library's errors too
        raise unreachable(f"--source {spec}", error) from None
    files = [
        {"name": file.rfilename, "bytes": file.size, "sha256": file.lfs.sha256 if file.lfs else None}
        for file in sorted(info.siblings or [], key=lambda f: f.rfilename)
        if Path(file.rfilename).stem == split or Path(file.rfilename).stem.startswith(f"{split}-")
    ]
    return {"id": spec, "revision": info.sha, "split": split}, files


def prepare_with_datasets(spec: str, split: str, revision: str | None) -> list[Path]:
    """Let ``datasets`` download and prepare a split; return the Arrow stream files that hold it.

    Raises:
        ValueError: no such split, or the download fails.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(spec, revision=revision)
        builder.download_and_prepare()
        splits = sorted(builder.info.splits or {})
        dataset = builder.as_dataset(split=split) if split in splits else None
    except Exception as error:
        raise unreachable(f"--source {spec} --split {split}", error) from None
    if dataset is None:  # slices and sums of splits are none either: whole files are read
        raise ValueError(f"--split {split}: {spec} has no such split. It has: {', '.join(splits)}")
    return [Path(entry["filename"]) for entry in dataset.cache_files]


def unreachable(what: str, error: BaseException) -> ValueError:
    """The one message for a hub that does not answer or does not have what was asked for."""
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
    return ValueError(
        f"{what}: no such local path, and the Hugging Face hub could not provide it "
        f"({type(error).__name__}: {reason}). {LOCAL_OPTIONS}"
    )
