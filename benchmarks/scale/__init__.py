"""Real models on cards of true size: which strategy trains fastest in the memory?

``python -m benchmarks.scale`` runs workloads, cards, allocators and strategies on the
hollow card (see `mimose.sim.hollow`) and prints one table. Bytes are exact; seconds
are those of the card's clock.
"""
