"""The database's schema, step by step: Alembic's scripts, which app.store.database.migrating runs."""
