"""Predicts what a step needs: fits of measured steps, for other sizes. No torch.

The input is samples. The output is a `PlanningProblem` for any sizes, or the reason why
it cannot be trusted.
"""
