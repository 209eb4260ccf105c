"""Commands that compare ways to train: `mimose bench`, `demo`, `advise` and `rehearse`.

`grid` compares strategies step by step, on several workloads; one is the demonstration.
`advise` says whether saving memory pays for a model; `rehearse` whether it fits a card
that is not there. They share `child` and `serve`,
which work in a separate process; `step_meter`, which measures one step from outside;
`rows`, results with their provenance, as CSV; `usage`, the options and their errors;
`machine`, `device`, `corpus` and `zoo`.
"""
