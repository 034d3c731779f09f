"""Planning of saves and loads that stays near linear in chunks and ranks.

boxes: which boxes overlap, as arrays. cover: torch's check of a global plan. reads: what to read
for which chunk.
"""
