"""What a drafter learns from, and the prompts it is measured on."""
