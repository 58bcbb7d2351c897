"""Adapters for other trainers, each imported by itself: trl, verl, prime_rl, slime."""
