"""Instructions of a local hit, with and without what watches and places it."""
