"""The command line: `mimose demo`, `bench`, `report`.

In come words from a shell; out go tables, files and an exit status.
"""
