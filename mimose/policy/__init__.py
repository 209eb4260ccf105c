"""What to do: a phase and a plan for every step, within the budget.

In come a step's facts and what is held; out goes a `Decision`. No torch.
"""
