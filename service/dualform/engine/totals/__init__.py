"""What rows add up to: sums of weights, outputs, and every weight in row order.

May import `plan` and what lies below it.
"""
