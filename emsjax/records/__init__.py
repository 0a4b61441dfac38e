"""JSON Lines in and out: input records, their prompts, and results that survive interruptions."""
