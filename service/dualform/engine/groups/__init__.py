"""The best groups: by what the weights, or contributions, of their rows add up to.

May import `topk` and what lies below it.
"""
