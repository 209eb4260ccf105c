"""Measures the numbers that README and docs quote; not a part of the wheel."""
