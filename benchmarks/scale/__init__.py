"""Real models on cards of their true size: who trains them fastest within the memory?

``python -m benchmarks.scale`` runs workloads, cards, allocators and strategies on the
hollow card (see `benchmarks.sim.hollow`) and prints one table. Bytes are exact,
seconds are the card's clock.
"""
