"""An opened index and what can be asked of it, checked before anything is computed.

May import `topk` and what lies below it.
"""
