"""Heads that each say a further token: Medusa."""
