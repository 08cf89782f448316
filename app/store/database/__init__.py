"""The database file: engine, locks, rights and migrations."""
