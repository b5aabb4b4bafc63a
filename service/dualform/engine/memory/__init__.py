"""The keys, values and states of an opened index, and how they are read and multiplied.

May import `rows` and what lies below it.
"""
