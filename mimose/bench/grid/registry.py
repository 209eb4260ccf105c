"""All strategies, by name."""

from __future__ import annotations

from collections.abc import Mapping

from mimose.bench.grid.paper import PAPER
from mimose.bench.grid.peers import PEERS
from mimose.bench.grid.strategies import OWN, Strategy

STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy for strategy in (*OWN, PAPER, *PEERS)
}
