"""The best rows: proposed by sketches, FAISS or a scan, decided by exact scores.

May import `totals` and what lies below it.
"""
