"""`mimose bench`: every strategy on the same batches, at several budgets.

`workloads` and `traces` say what is trained, `strategies` how. `worker` takes the steps
of one strategy, `runner` starts a process for each and lets them take turns. `summary`
says what the rows come to, `picture` draws it; `command` and `demo` are what a user
runs.
"""
