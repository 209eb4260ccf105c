"""What arrives: a call of the model, described by its sizes, and the model's layers.

In come the model and what it is called with; out go its layers, and for every step a
`StepInput`: the context and the sizes that a plan is looked up by.
"""
