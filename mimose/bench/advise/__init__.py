"""`mimose advise`: does saving memory pay, and with which method?

Each method is measured at a few batch sizes: first memory, then seconds, in rounds in
which the methods take turns. Two fits for each method then answer for any memory.
"""
