"""FAISS on the host and on GPUs: what of a layer's memory lies there, and what is computed there.

May import `plan` and what lies below it.
"""
