"""Callbacks for trainers; each module needs its trainer's package installed."""
