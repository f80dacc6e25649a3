"""Where an instance goes: fleet + demand -> outcome. Pure: no IO, no clock, no randomness.

The way of one decision: `decide` -> `search` (one per demand, kept in a `memo`) -> `filters` drop
workers -> `fit` walks the engine's ladder -> `score` ranks -> `tie` breaks even scores -> the answer, or
`refusal` says why there is none.
"""
