"""`mimose bench`: every strategy on the same batches, at several budgets.

`workloads` and `traces` define what is trained, `strategies` how. `worker` runs the
steps of one strategy; `runner` starts a process for each and lets them take turns.
`summary` sums up the rows, and `picture` draws them. Users run `command` and `demo`.
"""
