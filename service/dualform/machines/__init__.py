"""An index's shards on several machines or processes, by Ray: the server asks each, and merges.

`parts` says who opens what, `machine` what one of them does when it is asked, `fleet` keeps them
there, `merging` makes one answer of theirs, and `spread` is the index that the server asks.
Importing this package loads neither torch nor Ray.
"""

__all__: list[str] = []
