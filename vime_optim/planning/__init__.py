"""Planning of saves and loads that stays near linear in chunks and ranks.

global_check, shards, local_shards: the checks of torch and Megatron, answered faster. save_plans,
packed, exchange: plans as columns, and how ranks send them.
whole, records, metadata_file, results: `.metadata` made from columns. reads: what to read for which
chunk.
"""
