"""Real models on cards of their true size: who trains them fastest within the memory?

``python -m mimose.bench.scale`` runs workloads, cards, allocators and strategies on the
hollow card (see `mimose.bench.sim.hollow`) and prints one table. Bytes are exact,
seconds are the card's clock.
"""
