"""Holding what a call saved in the host's memory, and bringing it back in backward.

What may be held there, and in which memory, says `host`; how bytes get there and back
`copies`; what becomes of one storage `codec`.
"""
