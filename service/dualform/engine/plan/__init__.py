"""Which way to answer a question, and what each way would cost.

May import `memory` and what lies below it.
"""
