"""Ids and metadata of rows: which there are, which a filter selects, how columns group them.

May import the store, and `errors`, `context` and `threads` of the engine.
"""
