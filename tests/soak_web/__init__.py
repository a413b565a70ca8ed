"""The fault run of browser sessions: real workers, real processes as browsers, seeded random faults, an empty ledger at
the end."""
