"""Strategies measured against each other, and the library against its promises.

`grid` compares strategies, on workloads of which the demonstration is one; `proofs` ask
one question each, `check` looks at a device. They share `child` and `serve` (work in a
process of its own), `step_meter` (one step measured from outside), `rows` (results with
their provenance, as CSV), `limits`, `corpus`, `zoo` and `sim`.
"""
