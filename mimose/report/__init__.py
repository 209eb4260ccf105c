"""Shows a run: text for a terminal, numbers for loggers, pages for browsers.

The input is a run's records. Nothing here changes a run.
"""
