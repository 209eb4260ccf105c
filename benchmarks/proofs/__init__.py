"""Measurements that show whether the library keeps its promises: one file a question.

``python -m benchmarks.proofs NAME`` runs one of them. It prints a table and the bars,
which were set before, writes all rows to a CSV file, and ends with one line of JSON.
Each model trains in a separate process, with the same threads and allocator settings.
"""
