"""The command line: `mimose demo`, `advise`, `bench`, `report`.

In `main` each command is a function whose docstring is its help. All leave JSON in a
file and end with words; with ``--json`` the JSON alone is printed. Everything heavy,
and everything that an extra installs, is imported when a command needs it.
"""
