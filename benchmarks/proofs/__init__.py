"""Measurements that show whether the library keeps its promises, one file a question.

``python -m benchmarks.proofs NAME`` asks one of them: it prints a table and the bars
that were set before, writes a CSV file with every row, and ends with one line of
JSON. Every model trains in a separate process, with the same thread and allocator
settings.
"""
