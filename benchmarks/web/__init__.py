"""What browser sessions cost: see `question.md`."""
