"""The first minutes on a card: what the library relies on, looked at line by line.

Each module is a group of checks, each check yields `Line`s. Groups run in processes of
their own (`benchmarks.proofs.check` starts them), need no more than mimose itself
does, and run on the simulated accelerator as well.
"""
