"""How a drafter learns: the EAGLE-3 model, its loss, the trainer and the walk. Needs torch."""
