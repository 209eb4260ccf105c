"""The command line: `mimose demo`, `advise`, `bench`, `report`.

In `main` each command is a function whose docstring is its help. All write JSON to a
file and print text; with ``--json`` they print only the JSON. Heavy packages, and those
that an extra installs, are imported when a command needs them.
"""
