"""Records the allocations of a step, finds the purpose of each, and writes snapshots for pytorch.org/memory_viz.

`recording` listens to the allocator, on a GPU (`cuda`) or a CPU (`cpu`); `ledger` follows the history and gives each
allocation its category, of those in `categories`; `snapshot` reads and writes torch's format, in which both recordings
keep their history; `stacks` finds the line of code behind an allocation.
"""
