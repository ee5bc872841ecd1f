"""Models on the Hugging Face hub, always of one commit.

    pin("Qwen/Qwen3.5-4B")              "Qwen/Qwen3.5-4B@<commit>": what the hub holds now
    pin("Qwen/Qwen3.5-4B@main")         a branch, a tag or a commit may be named
    config_file("Qwen/Qwen3.5-4B@...")  path of its config.json in the local cache, nothing else is fetched
    tokenizer_file("Qwen/...")          path of its tokenizer.json; None where it has none
    weights_folder("Qwen/...")          folder with all of it; of a local folder itself; None for random weights

Guarantees: what was downloaded before serves without a network; without one an error comes within seconds.
Costs: one small request before each download, because a download's own retries take half a minute.
"""

import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
"""OWNER/NAME, or OWNER/NAME@REVISION."""

NETWORK_SECONDS = 5.0
"""How long the hub may take to answer."""

WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""Files of a checkpoint: weights, configurations, tokenizer, template."""

TOKENIZER = "tokenizer.json"

ADVICE = "Pass a folder with config.json and safetensors (--model takes random:SIZE as well)"


def is_random(spec: str) -> bool:
    """Whether a `--model` value asks for random weights."""
    return spec.startswith("random:")


def is_commit(revision: str | None) -> bool:
    """Whether a revision is the full name of a commit."""
    return re.fullmatch("[0-9a-f]{40}", revision or "") is not None


def pin(spec: str) -> str:
    """A hub id with the commit that it stands for now, `OWNER/NAME@COMMIT`; every other `--model` value as it is.

    Raises ValueError for what is no model, or cannot be reached and was never downloaded.
    """
    if is_random(spec) or Path(spec).is_dir():
        return spec
    # The cache keeps a file as .../snapshots/COMMIT/NAME, which tells the commit without a network too.
    return f"{parse(spec)[0]}@{config_file(spec).parent.name}"


def parse(spec: str, *, flag: str = "--model") -> tuple[str, str | None]:
    """(name, revision) of a hub id, and (folder, None) of a folder. Raises ValueError for anything else."""
    if Path(spec).is_dir():
        return spec, None
    found = None if spec.startswith(".") else HUB_ID.fullmatch(spec)
    if found is None:
        raise ValueError(
            f"{flag} {spec}: no such folder, and not a hub id of the form OWNER/NAME or OWNER/NAME@REVISION. {ADVICE}"
        )
    return found[1], found[2]


def config_file(spec: str) -> Path:
    """Path of the config.json of a folder or hub id.

    Raises ValueError for what is neither, or cannot be reached and was never downloaded.
    """
    if Path(spec).is_dir():
        return Path(spec) / "config.json"
    return _file(spec, "config.json")


def tokenizer_file(spec: str) -> Path | None:
    """Path of the tokenizer.json of a folder or hub id; None where it has none, or none can be had."""
    if Path(spec).is_dir():
        path = Path(spec) / TOKENIZER
        return path if path.is_file() else None
    try:
        return _file(spec, TOKENIZER)
    except ValueError:
        return None


def weights_folder(spec: str, *, flag: str = "--model") -> Path | None:
    """Local folder with the weights behind the value of an option, fetched if need be; None for random weights.

    Raises ValueError where the hub cannot be reached and the cache does not hold them.
    """
    if is_random(spec):
        return None
    if Path(spec).is_dir():
        return Path(spec)
    return _fetch(
        spec,
        lambda name, revision, offline: huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(WEIGHTS), local_files_only=offline
        ),
        flag=flag,
    )


def _file(spec: str, file: str) -> Path:
    return _fetch(
        spec,
        lambda name, revision, offline: huggingface_hub.hf_hub_download(
            name, file, revision=revision, local_files_only=offline
        ),
    )


def _fetch(spec: str, get: Callable[[str, str | None, bool], str], *, flag: str = "--model") -> Path:
    """What `get(name, revision, offline)` finds.

    It is given the revision as asked, not its commit: the cache remembers what a branch stood for only if it was asked
    for the branch, and needs that without a network.
    """
    name, revision = parse(spec, flag=flag)
    obstacle = _obstacle(name, revision, flag)
    try:
        return Path(get(name, revision, obstacle is not None))
    except OSError as error:
        if obstacle is not None and isinstance(error, LocalEntryNotFoundError):
            # The client's own text advises to call it with other arguments, which nobody can do from here.
            raise ValueError(f"{flag} {spec}: {obstacle}, and the local cache does not hold it. {ADVICE}") from error
        raise ValueError(
            f"{flag} {spec}: neither {huggingface_hub.constants.ENDPOINT} nor the local cache gave it "
            f"({_one_line(error)}). {ADVICE}"
        ) from error


def _obstacle(name: str, revision: str | None, flag: str) -> str | None:
    """Why the cache alone can hold this: the hub does not answer, or has the commit no more. None where it has it.

    Raises ValueError for a repository, a branch or a tag that does not exist, or that needs a login.
    """
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=NETWORK_SECONDS)
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{flag} {name}: neither a folder here nor a model on the hub that you may read. Check the spelling, or "
            f"log in with `hf auth login`. {ADVICE}"
        ) from error
    except RevisionNotFoundError as error:
        if is_commit(revision):
            return f"{huggingface_hub.constants.ENDPOINT} does not hold this commit any more"
        raise ValueError(
            f"{flag} {name}@{revision}: the hub has this model, but no such revision of it; look it up on its "
            f"page, or leave out @{revision} for the newest"
        ) from error
    except (OSError, huggingface_hub.errors.HTTPError) as error:  # type: ignore[attr-defined]
        return f"{huggingface_hub.constants.ENDPOINT} cannot be reached ({_one_line(error)})"
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
