"""What the faulty server serves beside chat and completions: right answers, but for one named fault."""
