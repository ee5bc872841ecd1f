"""The offline half: chats in, verified packed shards out. CPU only, no torch.

source   read       hub id, parquet, jsonl         -> Conversation
encode   render,    template, tokenizer, targets   -> Document (cached, knows no row length)
cut      cut        lengths and turn ends          -> pieces no longer than a row
binpack  plan       pieces                         -> PackPlan (which piece in which row)
shards   the format schema, manifest, publish, open -> PackedDataset[i] -> Row
pack     compose    python -m pipeline.pack
verify   recompute  python -m pipeline.verify
report   look       python -m pipeline.report: a table and one page; `page` is the kit that pages are made with
"""

__version__ = "0.1.0"
