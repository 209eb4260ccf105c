"""Training one workload under several strategies, and measuring all of them alike.

`rows` is the record of a step, `strategies` runs the steps, `worker` and `process` put
a strategy into a process of its own, `limits` bounds that process's memory, `summary`
and `figure` read the rows.
"""
