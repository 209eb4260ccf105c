"""Runs a step and its layers as decided, and measures the outcome.

The input is a `Decision`. The output is the model's output, the same as without a plan,
and what the cost model, the policy and the records learn of the step.
"""
