"""What a run did, as a table and as a page: `python -m trainer.report RUN`. Nothing here imports torch."""
