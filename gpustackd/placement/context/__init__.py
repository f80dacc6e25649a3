"""One demand against the fleet: filter mask, cards as arrays, rules; knows no selector."""
