"""`mimose bench`: every strategy on the same batches, at several budgets.

`workloads` and `traces` say what is trained, `strategies`, `paper` and `peers` how
(`registry` names them all), `worker` takes the steps of one strategy, `runner` starts a
process for each and lets them take turns, `summary` reads the rows, and `table`, `page`
and `picture` show what they say.
"""
