"""Decides what a step does: its phase and its plan, within the budget. No torch.

The input is a step's input and what is held. The output is a `Decision`; what comes
back is a `StepOutcome`.
"""
