"""Does saving memory pay here, and with which method?

Each method is measured at a few batch sizes: memory first, in a process for each, then
seconds, in two processes in which methods take turns. Two fits for each then answer for
any memory.
"""
