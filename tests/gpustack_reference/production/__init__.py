"""What production makes of a case: the only modules here that import gpustackd.

A case goes in as it is written, answers come out as plain values in the shape of `expect`. Decisions are
those of `decide` with the default policy, on a fleet that is the case's workers and what its instances
hold.
"""
