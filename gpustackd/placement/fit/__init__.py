"""Does it fit, and where: one file per step of the ladder, one file per engine for its rules."""
