"""What a packed dataset looks like, as a table and as a page: `python -m pipeline.report DATASET`."""
