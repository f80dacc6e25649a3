"""What a search must hold for one demand, by engine: flags and estimate as plain numbers."""
