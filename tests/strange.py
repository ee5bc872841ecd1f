"""What nobody would write, drawn for ``tests.fuzz``: chats, lines, tables, manifests of any shape, damaged parquet."""

import io
import json
import random
import sys
from decimal import Decimal
from functools import cache, reduce
from operator import getitem
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.chats import small_chats
from tests.forge import sealed

TEXT = st.text(max_size=12) | st.sampled_from(
    ["", " ", "<|im_end|>", "<think>a</think>b", "\x00", "\ufffe", "\ud800", "e\u0301", "\u202eabc", "{}", "[1]", "<im"]
)
NUMBERS = st.integers() | st.integers(10**30, 10**40) | st.floats() | st.booleans() | st.none()
ANY = st.recursive(
    NUMBERS | TEXT, lambda i: st.lists(i, max_size=3) | st.dictionaries(TEXT, i, max_size=3), max_leaves=8
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "function", ""]) | ANY
KINDS_OF_PART = st.sampled_from(["text", "image"]) | ANY
PARTS = st.fixed_dictionaries({}, optional={"type": KINDS_OF_PART, "text": TEXT | ANY, "image": ANY})
CALLS = st.fixed_dictionaries({}, optional={"function": ANY, "name": TEXT, "arguments": TEXT | ANY, "type": ANY})
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLES,
        "content": TEXT | st.lists(PARTS, max_size=3) | ANY,
        "tool_calls": st.lists(CALLS, max_size=2) | ANY,
        "reasoning_content": TEXT | ANY,
        "thinking": ANY,
        "name": ANY,
    },
)
GOOD = st.lists(TEXT, min_size=1, max_size=4).map(
    lambda texts: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate([*texts, "end"])]
)
CHATS = GOOD | st.lists(MESSAGES | ANY, max_size=4) | ANY
TOOL_LISTS = TEXT | st.lists(ANY, max_size=2) | ANY
ROWS = st.fixed_dictionaries({}, optional={"messages": CHATS, "tools": TOOL_LISTS, "other": ANY})


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line of jsonl, nearly one, or none at all; without its line break."""
    shape = draw(st.integers(0, 9))
    if shape == 0:
        return draw(st.binary(max_size=40)).replace(b"\n", b"")
    if shape == 1:
        depth = draw(st.sampled_from([50, 99, 100, 101, 400, 990, 5000, 200_000]))
        opening, closing = draw(st.sampled_from([("[", "]"), ('{"messages":', "}"), ('[{"content":', "}]")]))
        return f'{{"messages":{opening * depth}1{closing * depth}}}'.encode()
    if shape == 2:
        digits = b"9" * draw(st.sampled_from([20, 4300, 4301, 50_000]))
        return b'{"messages":[{"role":"user","content":' + digits + b"}]}"
    if shape == 3:
        return b'{"messages":1,"messages":[{"role":"user","role":"assistant","content":"a"}]}'
    text = json.dumps(draw(ROWS), ensure_ascii=draw(st.booleans()))
    line = text.encode(errors="surrogatepass").replace(b"\n", b"")
    if shape == 4 and line:
        at = draw(st.integers(0, len(line) - 1))
        return line[:at] + draw(st.binary(max_size=3)).replace(b"\n", b"") + line[at + draw(st.integers(0, 3)) :]
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe", b" "])) + line


JSONL = st.tuples(st.lists(lines(), max_size=6), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"]), st.booleans()).map(
    lambda drawn: drawn[1].join(drawn[0]) + (drawn[1] if drawn[2] else b"")
)

INT64 = st.integers(-(2**63), 2**63 - 1)
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), TEXT.filter(lambda t: "\ud800" not in t)),
    (pa.large_string(), st.just("x")),
    (pa.binary(), st.binary(max_size=4)),
    (pa.int64(), INT64),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float64(), st.floats()),
    (pa.float16(), st.just(0.5)),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
    (pa.timestamp("ns"), INT64),
    (pa.timestamp("s"), st.integers(-(2**53), 2**53)),
    (pa.timestamp("us", "UTC"), INT64),
    (pa.timestamp("ms", "Nowhere/Here"), st.integers(0, 9)),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.duration("ns"), INT64),
    (pa.time64("ns"), st.integers(0, 86_399_999_999_999)),
    (pa.decimal128(38, 2), st.just(Decimal("1.25"))),
    (pa.dictionary(pa.int32(), pa.string()), st.just("user")),
    (pa.date64(), st.just(0)),
]
NAMES = st.sampled_from(["role", "content", "tool_calls", "name", "text", "type", "", "role ", "é"])


@st.composite
def columns(draw: st.DrawFn, depth: int = 3) -> pa.DataType:
    """An Arrow type, often one of messages."""
    shape = draw(st.integers(0, 7)) if depth else 0
    if shape == 0:
        return draw(st.sampled_from(LEAVES))[0]
    if shape == 1:
        return pa.map_(pa.string(), draw(columns(depth=depth - 1)))
    if shape in (2, 3):
        kind = draw(st.sampled_from([pa.list_, pa.large_list, lambda t: pa.list_(t, 2)]))
        return kind(draw(columns(depth=depth - 1)))
    if shape == 4:
        names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=draw(st.booleans())))
        return pa.struct([(name, draw(columns(depth=depth - 1))) for name in names])
    content, more = draw(columns(depth=depth - 1)), draw(columns(depth=depth - 1))
    fields = [("role", pa.string()), ("content", pa.string() if draw(st.booleans()) else content), ("name", more)]
    return pa.list_(pa.struct(fields[: draw(st.integers(1, 3))]))


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values of an Arrow type, nulls among them."""
    inner: st.SearchStrategy[Any]
    if pa.types.is_map(kind):
        inner = st.lists(st.tuples(st.sampled_from("abé"), values(kind.item_type)), max_size=2)
    elif pa.types.is_fixed_size_list(kind):
        inner = st.lists(values(kind.value_type), min_size=2, max_size=2)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = st.lists(values(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        inner = st.tuples(*(values(kind.field(i).type) for i in range(kind.num_fields))).map(
            lambda held: list(zip(names, held, strict=True))
        )
    else:
        inner = next(strategy for leaf, strategy in LEAVES if leaf == kind)
    if pa.types.is_struct(kind) and any(kind.field(i).name == "role" for i in range(kind.num_fields)):
        inner = inner.map(
            lambda pairs: [(n, "assistant" if n == "role" and isinstance(v, str) else v) for n, v in pairs]
        )
    return st.none() | inner


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A parquet file of any columns, with few rows."""
    names = draw(st.lists(st.sampled_from(["messages", "messages", "tools", "id", ""]), min_size=1, max_size=3))
    kinds = [draw(columns()) for _ in names]
    num_rows = draw(st.integers(0, 5))
    arrays = [pa.array(draw(st.lists(values(k), min_size=num_rows, max_size=num_rows)), k) for k in kinds]
    sink = io.BytesIO()
    table = pa.table(arrays, names=names)
    pq.write_table(table, sink, row_group_size=draw(st.integers(1, 5)), store_schema=draw(st.booleans()))
    return sink.getvalue()


def damaged(rng: random.Random) -> bytes:
    """A good parquet file with bits flipped, bytes cut, zeroed, moved or put in, half of the time in its footer."""
    body = bytearray(rng.choice(good_files()))
    footer = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        if len(body) < 12:
            break
        low = rng.choice([0, min(footer, len(body) - 9)])
        at = rng.randrange(low, len(body))
        kind = rng.randrange(6)
        if kind <= 2:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            body[at] = rng.choice([0, 1, 127, 128, 255])
        elif kind == 4:
            size = rng.randrange(1, 32)
            body[at : at + size] = bytes(len(body[at : at + size]))
        elif rng.random() < 0.3:
            del body[at : at + rng.choice([1, 2, 8, len(body)])]
    return bytes(body)


@cache
def good_files() -> list[bytes]:
    """Small parquet files of chats, as different writers write them."""
    chats = small_chats(12, longest=6)
    tools = [None if i % 2 else [{"type": "function", "function": {"name": f"f{i}"}}] for i in range(12)]
    options: list[dict[str, Any]] = [
        {"compression": "none"}, {"compression": "snappy"}, {"compression": "zstd", "data_page_version": "2.0"},
        {"use_dictionary": False, "row_group_size": 5}, {"write_page_index": True, "row_group_size": 3},
        {"write_page_checksum": True}, {"store_schema": False, "data_page_size": 64},
    ]  # fmt: skip
    out = []
    for more in options:
        sink = io.BytesIO()
        pq.write_table(pa.table({"messages": chats, "tools": tools}), sink, **more)
        out.append(sink.getvalue())
    return out


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in items for p in ((*path, key), *paths(inner, (*path, key)))]


BIG = st.sampled_from([-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000])


@st.composite
def manifests(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid manifest with fields altered, removed, added or nested deeply, sealed again where that can be done."""
    body = json.loads(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(body)))
        inner = reduce(getitem, path[:-1], body)
        shape = draw(st.integers(0, 4))
        if shape == 0:
            del inner[path[-1]]
        elif shape == 1 and isinstance(inner, dict):
            inner[draw(TEXT)] = draw(ANY)
        elif shape == 2:
            depth = draw(st.sampled_from([10, 300, 900, 5000]))
            deep: Any = 1
            for _ in range(depth):
                deep = [deep]
            inner[path[-1]] = deep
            break
        else:
            inner[path[-1]] = draw(ANY | BIG)
    return deeply(body)


def deeply(body: dict[str, Any]) -> bytes:
    """The bytes of a manifest with its seals, if it can have any, nested more deeply than Python allows or not."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        return sealed(body)
    except (TypeError, UnicodeEncodeError, KeyError, ValueError):  # floats and the like
        return json.dumps(body).encode() + b"\n"
    finally:
        sys.setrecursionlimit(limit)


def altered_bytes(rng: random.Random, valid: bytes) -> bytes:
    """A valid manifest with bytes flipped, put in, cut or doubled."""
    data = bytearray(valid)
    at = rng.randrange(len(data))
    kind = rng.randrange(5)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at:at] = rng.choice([b"\0", b" ", b"\xff", b'"', b"{", b"1e5", b"-", b"\\ud800", b",", b"9" * 5000])
    elif kind == 2:
        del data[at : at + rng.randrange(1, 20)]
    elif kind == 3:
        data[at:at] = data[at : at + rng.randrange(1, 60)]
    else:
        del data[at:]
    return bytes(data)
