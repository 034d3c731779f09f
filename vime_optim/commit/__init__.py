"""A save or a load is done by all ranks or by none.

Saves: sessions (from the first byte to the commit), lock, file_plan and task (what is written).
Loads: load_check (what is not whole is refused), loading (half loaded). Both: agreement.
"""
