"""What is printed when a dataset is finished: one table, and what its numbers suggest to change.

Guarantees: every chat read is in it, packed or rejected by reason. Costs: a pass over the piece lengths for the bound.
"""

import re
from collections.abc import Iterable

import numpy as np

from pipeline.assemble import EncodedSet, reject_lines
from pipeline.binpack import PackPlan
from pipeline.bounds import lower_bound
from pipeline.manifest import Manifest
from pipeline.source import Reject

TOOL_TAGS_SHARE = 1000  # more than one chat in so many with tool tags as text: calls were written into contents
_TOOL_TAGS = re.compile(r"([0-9]+) of them tool tags")


def summary(
    manifest: Manifest,
    encoded: EncodedSet,
    plan: PackPlan,
    *,
    milliseconds: dict[str, int],
    template_adds: tuple[str, ...] = (),
) -> str:
    """One table of what came out; ``milliseconds`` by stage, ``template_adds`` what a Renderer notes."""
    totals, max_tokens = manifest.totals, manifest.max_tokens
    rows, tokens, capacity = totals["rows"], totals["tokens"], totals["rows"] * max_tokens
    size = sum(entry["bytes"] for entry in manifest.files["shards"])
    least = lower_bound(plan.stops.astype(np.int64) - plan.starts, max_tokens=max_tokens, rows=rows)
    rejected = ", ".join(f"{reason} {n:,}" for reason, n in totals["rejected"].items()) or "none"
    lines = [
        ("rows", f"{rows:,} of {max_tokens:,} tokens in {len(manifest.files['shards']):,} shards; no packing of these "
                 f"pieces has fewer than {least:,}: {rows - least:,} above that bound"),
        ("fill", f"{tokens / capacity:.3%} ({totals['padding']:,} tokens of padding; at most "
                 f"{min(1, tokens / (least * max_tokens)):.3%} by the bound)"),
        ("tokens", f"{tokens:,}, of them targets {totals['targets']:,} ({totals['targets'] / tokens:.1%})"),
        ("chats", f"{totals['chats_read']:,} read, {totals['documents']:,} packed, {totals['truncated']:,} truncated, "
                  f"{totals['split']:,} split, {totals['escaped']:,} with control strings as text"),
        ("cut", f"{totals['tokens_cut']:,} tokens, {totals['rounds_cut']:,} rounds"),
        ("rejected", rejected),
        ("bytes", f"{size:,} in shards, {size / capacity:.2f} a token of row, {size / tokens:.2f} a token"),
        ("seconds", ", ".join(f"{stage} {ms / 1000:.1f}" for stage, ms in milliseconds.items())),
        ("dataset_id", manifest.dataset_id),
    ]  # fmt: skip
    if template_adds:
        lines.append(("template", "adds " + " and ".join(template_adds) + " (see --template-kwargs)"))
    if advice := tool_advice(encoded):
        lines.append(("tools", advice))
    return table(lines)


def table(lines: list[tuple[str, str]]) -> str:
    """Names and what they are, in two columns."""
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def tool_advice(encoded: EncodedSet) -> str:
    """What to do where many chats hold tool tags as text; empty if few do."""
    found = [_TOOL_TAGS.search(line.detail) for line in encoded.rejects if line.what == "escaped"]
    num = sum(match is not None and int(match[1]) > 0 for match in found)
    if num * TOOL_TAGS_SHARE <= encoded.num_chats:
        return ""
    return (
        f"{num:,} of {encoded.num_chats:,} chats hold tool tags such as <tool_call> in their contents, packed as "
        "plain text: inline calls belong in tool_calls of the message, their results in messages of role tool"
    )


def nothing_left(encoded: EncodedSet, plan: PackPlan) -> str:
    """Why there is no row at all."""
    if not encoded.num_chats:
        return "the files of --source hold no chat: not one row, or line that is not blank"
    return none_packed(f"{encoded.num_chats:,}", reject_lines(encoded, plan))


def none_packed(of: str, lines: Iterable[Reject]) -> str:
    """Why none of some chats can be packed: how many for each reason, the first of them, and what to do."""
    by_reason: dict[str, list[Reject]] = {}
    for line in sorted((line for line in lines if line.what == "rejected"), key=lambda line: line.doc_id):
        by_reason.setdefault(line.reason, []).append(line)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    counts = ", ".join(f"{len(held):,} {reason} (row {held[0].doc_id}: {held[0].detail})" for reason, held in ordered)
    advice = dict.fromkeys(_advice(held[0]) for _, held in ordered)
    return f"none of {of} chats can be packed: {counts}. {' '.join(advice)}"


_ADVICE = (
    ("no_messages", "--messages-column must name the column of messages."),
    (
        ".*: the line ",
        "A .jsonl file is UTF-8 text with one JSON object a line, ended by a line feed: convert this one to that, a "
        "JSON array by jq -c '.[]'.",
    ),
    (
        "bad_type: messages ",
        'The --messages-column must hold lists of {"role", "content"}: parse JSON text into lists, or name another.',
    ),
    (".*tool", "Tools are a list of objects or its JSON text, calls hold a name and arguments: check --tools-column."),
    (
        "bad_type: message .* no role",
        'Messages must be {"role", "content"}: rename other keys, as "from" and "value", and name the roles system, '
        "user, assistant, tool.",
    ),
    ("bad_type", 'Messages must be {"role", "content"} with text as content.'),
    ("unknown_role", "Name the roles as the chat template does: system, user, assistant, tool."),
    ("template_", "Use the chat template that these chats are written for: --tokenizer, --template-kwargs."),
    ("no_target", "A chat needs an assistant turn to learn."),
    ("longer_than_row", "Raise --max-tokens, or choose --overflow truncate or split."),
    (".*_longer_than_row", "Raise --max-tokens."),
    ("", "Write the source again from valid data."),
)
"""What to do about chats that are rejected, by how "reason: detail" begins; the first that fits."""


def _advice(line: Reject) -> str:
    return next(advice for start, advice in _ADVICE if re.match(start, f"{line.reason}: {line.detail}"))
