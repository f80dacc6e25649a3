"""The decision record: what is decided over cases, seeded fleets and the demo, held byte for byte."""
