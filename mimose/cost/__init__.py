"""What a step will need: fits of what was measured, for sizes that were not.

In go samples; out comes a `PlanningProblem` for any sizes, or the reason why it cannot
be trusted. No torch.
"""
