"""What a user runs to compare ways to train: `mimose bench`, `demo` and `advise`.

`grid` compares strategies step by step, on workloads of which the demonstration is one;
`advise` says whether saving memory pays for a model. They share `child` and `serve`,
for work in a separate process; `step_meter`, one step measured from outside; `rows`,
results with their provenance, as CSV; `machine`, `device`, `corpus` and `zoo`.
"""
