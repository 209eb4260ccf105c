"""Reads memory, and keeps a step within its budget.

The input is a device or a process. The output is what it holds, and a limit that its
allocator enforces.
"""
