"""Tell: text for people, numbers for loggers, pages for browsers.

In come a run's records; out goes what is shown. Nothing here changes a run.
"""
