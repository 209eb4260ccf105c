"""Does saving memory pay here, and with which method?

Each method is measured in a process of its own at a few batch sizes: memory first, then
seconds, all methods by turns. Two fits for each then answer for any memory.
"""
