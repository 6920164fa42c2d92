"""A worker's life, and what a user's script iterates: set-up, membership, the loop, evaluation, the end. It alone knows
all the packages below.
"""
