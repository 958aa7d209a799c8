"""Keys and values of past positions, so that a decode step runs one position and not all of them.

`kv` is the interface and the naive path, `contiguous` one preallocated buffer per request, `growing` one that is
copied into a longer one at every step.
"""
