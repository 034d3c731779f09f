"""The bytes of a checkpoint: written, found again, read safely.

Boxes: geometry, cover. Writing: fastfile, archive, lazy, window, manifest. Reading tensors:
reading, filling, items. What is compared with the manifest's digests: checked. Everything
that is not a tensor: plain, dcp_metadata, pickles, safe_load, stand_ins, objects.
"""
