"""What does a step of a served environment cost? `question.md` says what is measured."""
