"""What selectors share: their contract, columns over the fleet, sets of GPUs, picked GPUs."""
